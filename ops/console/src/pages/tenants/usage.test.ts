import { expect, test } from "vitest";

import { beginning, drawn, type Usage } from "./usage";

const START = 1_700_006_400;
const row = (day: number, model: string | null, tokens: number): Usage => ({
  hour: null, day: new Date((START + day * 86_400) * 1000).toISOString(), month: null, tenant: null, model, tier: null,
  requests: 1, failed: 0, input_tokens: tokens, output_tokens: 1,
});

test("days begin in UTC, and today is one of them", () => {
  expect(beginning(1, START + 5)).toBe(START);
  expect(beginning(7, START + 86_399)).toBe(START - 6 * 86_400);
});

test("each model has its line, the others one, and a day without usage is zero", () => {
  const whole = [row(2, null, 9), row(0, null, 4)];
  const { times, lines } = drawn(START, 3, "tokens", whole, new Map([["a", [row(2, "a", 3)]]]));
  expect(times).toEqual([START, START + 86_400, START + 2 * 86_400]);
  expect(lines).toEqual([{ name: "a", values: [0, 0, 4] }, { name: "others", values: [5, 0, 6] }]);
});

test("without others there is no line of them", () => {
  const { lines } = drawn(START, 1, "requests", [row(0, null, 4)], new Map([["a", [row(0, "a", 4)]]]));
  expect(lines).toEqual([{ name: "a", values: [1] }]);
});
