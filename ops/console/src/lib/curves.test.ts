import { describe, expect, it } from "vitest";

import { means, steps, stretched } from "./curves";

describe("lines of a chart", () => {
  const times = steps(600, 1500, 300);
  it("has a step for each begun length", () => expect(times).toEqual([600, 900, 1200]));
  it("takes means, and leaves gaps", () => {
    const points = [[540, 9], [600, 1], [660, 3], [1260, 4], [1500, 9]].map(([start_s = 0, tokens_per_s = 0]) => ({ start_s, tokens_per_s }));
    expect(means(points, times, 300)).toEqual([2, null, 4]);
  });
  it("stretches windows over their hour", () => expect(stretched([5, 6], times, 900, 600)).toEqual([null, 5, 6]));
});
