/** Objectives as lines of a chart: one a tier, with gaps where nothing was answered. */
import type { Schemas } from "../../api/client";

type Point = Schemas["ObjectivePoint"];

export function aligned(points: readonly Point[], bucketS: number): { times: number[]; lines: { name: string; values: (number | null)[] }[] } {
  const [first, last] = [points[0], points.at(-1)];
  if (first === undefined || last === undefined) return { times: [], lines: [] };
  const times = Array.from({ length: (last.start_s - first.start_s) / bucketS + 1 }, (_, index) => first.start_s + index * bucketS);
  const tiers = [...new Set(points.map(({ tier }) => tier))].sort();
  const lines = tiers.map((tier) => {
    const share = new Map(points.filter((point) => point.tier === tier).map((point) => [point.start_s, point.kept / point.answers]));
    return { name: tier, values: times.map((time) => share.get(time) ?? null) };
  });
  return { times, lines };
}
