/** Usage over whole days in UTC, and how it is laid out for a chart: one line a model. */
import type { Schemas } from "../../api/client";
import { unixSeconds } from "../../lib/format";

export type Usage = Schemas["UsageRow"];

/** What can be chosen as the length of time; the first is what an address without one means. */
export const DAYS = [7, 30, 90] as const;
export const MEASURES = ["tokens", "requests"] as const;
export type Measure = (typeof MEASURES)[number];

const DAY_S = 86_400;
/** Models that have lines of their own. */
export const LINES_MAX = 5;

export function daysOf(text: string): number {
  return DAYS.find((days) => String(days) === text) ?? DAYS[0];
}

/** The beginning of the first of the last `days` days in UTC, of which today is one. */
export function beginning(days: number, now = Date.now() / 1000): number {
  return (Math.floor(now / DAY_S) - days + 1) * DAY_S;
}

/** Address of a CSV file of the same days. */
export function asCsv({ by, tenant, days }: { by: readonly string[]; tenant?: string; days: number }): string {
  const query = new URLSearchParams(by.map((name): [string, string] => ["by", name]));
  if (tenant !== undefined) query.set("tenant", tenant);
  query.set("since", new Date(beginning(days) * 1000).toISOString());
  return `../admin/usage.csv?${query.toString()}`;
}

export function measured(usage: Usage, measure: Measure): number {
  return measure === "requests" ? usage.requests : usage.input_tokens + usage.output_tokens;
}

interface Line {
  name: string;
  values: number[];
}

export interface Drawn {
  times: number[];
  lines: Line[];
}

/** Lines of the models that were used most, and one of all others; a day without usage is zero. */
export function drawn(start: number, days: number, measure: Measure, whole: readonly Usage[], models: ReadonlyMap<string, readonly Usage[]>): Drawn {
  const times = Array.from({ length: days }, (_, day) => start + day * DAY_S);
  const values = (rows: readonly Usage[]): number[] => {
    const of = new Map(rows.map((row) => [row.day === null ? start : unixSeconds(row.day), measured(row, measure)]));
    return times.map((time) => of.get(time) ?? 0);
  };
  const lines = [...models].map(([name, rows]) => ({ name, values: values(rows) }));
  const others = values(whole).map((total, day) => lines.reduce((left, line) => left - (line.values[day] ?? 0), total));
  if (others.some((value) => value > 0)) lines.push({ name: lines.length === 0 ? "all models" : "others", values: others.map((value) => Math.max(0, value)) });
  return { times, lines };
}
