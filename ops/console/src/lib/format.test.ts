import { describe, expect, it } from "vitest";

import { amount, bytes, counted, distance, duration, moment, percent, price, shortId, someOf } from "./format";

const plain = (text: string) => text.replaceAll("\u202f", " ");

describe("what people read", () => {
  it.each([
    [null, "–"], [0, "0"], [9_999, "9,999"], [12_345, "12.3K"], [1_234_567, "1.23M"], [0.5, "0.5"], [Number.NaN, "–"],
  ])("amount %s", (value, text) => expect(amount(value)).toBe(text));

  it.each([
    [0.32, "320 ms"], [4.21, "4.2 s"], [61, "61 s"], [200, "3 min 20 s"], [7_500, "2 h 5 min"], [3600, "1 h"],
    [273_600, "3 d 4 h"], [-200, "−3 min 20 s"], [undefined, "–"],
  ])("duration %s", (value, text) => expect(plain(duration(value))).toBe(text));

  it.each([[0, "0 B"], [1023, "1023 B"], [1024, "1.0 KiB"], [80 * 1024 ** 3, "80.0 GiB"]])("bytes %s", (value, text) =>
    expect(plain(bytes(value))).toBe(text));

  it("names units", () => {
    expect(plain(amount(12, "tokens/s"))).toBe("12 tokens/s");
    expect(plain(percent(0.987))).toBe("98.7 %");
    expect(plain(price(12.5))).toBe("12.50 /h");
    expect(counted(1, "instance")).toBe("1 instance");
    expect(counted(0, "batch", "batches")).toBe("0 batches");
  });

  it("shortens ids and lists", () => {
    expect(shortId("batch_01a20b633ca371ce9a2f60e21a85caff")).toBe("batch_…1a85caff");
    expect(shortId("batch_7")).toBe("batch_7");
    expect(someOf(["a", "b", "c"], 2)).toBe("a, b and 1 more");
    expect(someOf(["a", "b"], 2)).toBe("a, b");
    expect(someOf([], 2)).toBe("–");
  });

  it("leaves out what a moment has in common with now", () => {
    const at = (...day: [number, number, number]) => new Date(...day, 12, 0).getTime() / 1000;
    const now = at(2026, 10, 29);
    expect(moment(at(2026, 10, 29), now)).toBe("12:00");
    expect(moment(at(2026, 10, 30), now)).toBe("30 Nov, 12:00");
    expect(moment(at(2036, 10, 30), now)).toBe("30 Nov 2036, 12:00");
  });

  it("says how far a moment is", () => {
    expect(plain(distance(1000, 1200))).toBe("3 min 20 s ago");
    expect(plain(distance(1200, 1000))).toBe("in 3 min 20 s");
    expect(distance(1000.2, 1000)).toBe("now");
  });
});
