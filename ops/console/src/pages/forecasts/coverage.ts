/** Coverage: the share of hours whose peak stayed at or under the forecast's upper quantile. */

interface Hour {
  peak_upper: number;
  actual_peak: number | null;
}

/** Whether the coverage of so many hours may be that of this quantile: it lies within two standard errors of it. */
export function covers(coverage: number | null | undefined, hours: number, quantile: number): boolean {
  if (coverage === null || coverage === undefined || hours === 0) return true;
  return coverage >= quantile - 2 * Math.sqrt((quantile * (1 - quantile)) / hours);
}

/** For each hour the coverage of the last `length` ones with it; null where none of them is known. */
export function rolling(hours: readonly Hour[], length: number): (number | null)[] {
  return hours.map((_, index) => {
    const known = hours.slice(Math.max(0, index + 1 - length), index + 1).filter(({ actual_peak }) => actual_peak !== null);
    if (known.length === 0) return null;
    return known.filter(({ actual_peak, peak_upper }) => (actual_peak ?? 0) <= peak_upper).length / known.length;
  });
}
