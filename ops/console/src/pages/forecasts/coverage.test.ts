import { describe, expect, it } from "vitest";

import { covers, rolling } from "./coverage";

describe("coverage", () => {
  it("is held against its quantile with room for chance", () => {
    expect(covers(0.85, 24, 0.9)).toBe(true);
    expect(covers(0.5, 24, 0.9)).toBe(false);
    expect(covers(0.85, 1000, 0.9)).toBe(false);
    expect(covers(null, 0, 0.9)).toBe(true);
  });

  it("is that of the last hours", () => {
    const hours = [1, 3, null, 1, 3].map((actual_peak) => ({ actual_peak, peak_upper: 2 }));
    expect(rolling(hours, 2)).toEqual([1, 0.5, 0, 1, 0.5]);
    expect(rolling([{ actual_peak: null, peak_upper: 1 }], 2)).toEqual([null]);
  });
});
