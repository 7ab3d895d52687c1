/** Measured points as lines of a chart: means over steps of equal length; a step without a point is a gap. */

interface Point {
  start_s: number;
  tokens_per_s: number;
}

/** Beginnings of the steps of [fromS, untilS). */
export function steps(fromS: number, untilS: number, stepS: number): number[] {
  return Array.from({ length: Math.max(0, Math.ceil((untilS - fromS) / stepS)) }, (_, index) => fromS + index * stepS);
}

/** The mean of the points of each step of `times`. */
export function means(points: readonly Point[], times: readonly number[], stepS: number): (number | null)[] {
  const first = times[0] ?? 0;
  const sums = new Array<number>(times.length).fill(0);
  const counts = new Array<number>(times.length).fill(0);
  for (const { start_s, tokens_per_s } of points) {
    const place = Math.floor((start_s - first) / stepS);
    if (place < 0 || place >= times.length) continue;
    sums[place] = (sums[place] ?? 0) + tokens_per_s;
    counts[place] = (counts[place] ?? 0) + 1;
  }
  return sums.map((sum, place) => (counts[place] ? sum / (counts[place] ?? 1) : null));
}

/** A value for each step of `times`: that of the window it lies in; null outside of all windows of [fromS, fromS + lengthS). */
export function stretched(windows: readonly number[], times: readonly number[], fromS: number, lengthS: number): (number | null)[] {
  return times.map((time) => {
    const place = Math.floor(((time - fromS) / lengthS) * windows.length);
    return time < fromS ? null : (windows[place] ?? null);
  });
}
