import { expect, test } from "vitest";

import { shares, steps } from "./shares";

test("each model has its share of the whole", () => {
  expect(shares({ a: 95, b: 5 })).toEqual([["a", "95 %"], ["b", "5 %"]]);
  expect(shares({ a: 2, b: 1, c: 0 })).toEqual([["a", "66.7 %"], ["b", "33.3 %"], ["c", "0 %"]]);
});

test("steps rise from 1 to at most 100", () => {
  expect(steps("5, 25,100")).toEqual([5, 25, 100]);
  for (const text of ["", "0", "5,5", "50,20", "101", "5,", "a", "1.5"]) expect(steps(text)).toBeNull();
});
