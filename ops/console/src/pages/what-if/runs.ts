/** What-if runs: what they change, and their figures as the simulator names them, as lines of tables and charts. */
import type { Schemas } from "../../api/client";
import { amount, count, duration, percent, unixSeconds } from "../../lib/format";
import { tierWords } from "../../lib/tiers";

export type Run = Schemas["WhatIf"];
export type Changes = Schemas["WhatIfChanges"];

interface Row {
  model: string | null;
  tier: string;
  requests: number;
  failed: number;
  service_attainment: number;
  ttft_violations: number;
  ttft_s: { p95: number } | null;
  tbt_mean_s: { p95: number } | null;
}

export interface Figures {
  strategy: string | null;
  requests: number;
  failures: Record<string, number>;
  simulated_s: number;
  /** Unix time of the demand with which the run begins; runs of an older release lack it. */
  demand_from_s?: number;
  seconds: number;
  service_attainment: number;
  token_attainment: number;
  tiers: Row[];
  models: Row[];
  totals: {
    gpu_hours: Record<string, number>;
    cost: number;
    scale_outs: number;
    scale_ins: number;
    switches: number;
    node_failures: number;
    interrupted: number;
    unplaced: number;
  };
  series: { step_s: number; gpus: Record<string, number[]>; tiers: { tier: string; ttft_p95_s: (number | null)[] }[] };
}

/** A completed run with what to call it beside another. */
export interface Shown {
  name: string;
  run: Run;
  figures: Figures;
}

/** A figure of each shown run; `better`: whether more of it is good (1), bad (-1) or neither (0). */
export interface Line {
  name: string;
  values: (number | null)[];
  better: -1 | 0 | 1;
  format: (value: number | null) => string;
}

/** How often a run that has not ended is asked for. */
export const OPEN_EVERY_MS = 2000;

export const isOpen = (run: Run): boolean => run.state === "queued" || run.state === "running";

const sum = (values: readonly number[]): number => values.reduce((total, value) => total + value, 0);
const dollars = (value: number | null): string => (value === null ? "–" : `${value < 0 ? "−" : ""}$${amount(Math.abs(value))}`);
const hours = (value: number | null): string => amount(value, "h");
const share = (value: number | null): string => percent(value, 2);

type Of<Thing> = readonly [string, -1 | 0 | 1, (value: number | null) => string, (thing: Thing) => number | null];

/** GPU hours that are paid for: all but those lent out as spot. */
const heldHours = ({ totals }: Figures): number => sum(Object.entries(totals.gpu_hours).map(([state, held]) => (state === "spot" ? 0 : held)));

const TOTALS: readonly Of<Figures>[] = [
  ["Time simulated", 0, duration, (each) => each.simulated_s],
  ["Requests", 0, count, (each) => each.requests],
  ["Failed or refused", -1, count, (each) => sum(Object.values(each.failures))],
  ["Requests that kept their objectives", 1, share, (each) => each.service_attainment],
  ["Tokens in time", 1, share, (each) => each.token_attainment],
  ["Cost", -1, dollars, (each) => each.totals.cost],
  ["GPU hours, all but spot", -1, hours, heldHours],
  ["GPU hours warming", -1, hours, (each) => each.totals.gpu_hours["warming"] ?? 0],
  ["GPU hours lent as spot", 0, hours, (each) => each.totals.gpu_hours["spot"] ?? 0],
  ["Instances asked for", -1, count, (each) => each.totals.scale_outs],
  ["Instances let go", 0, count, (each) => each.totals.scale_ins],
  ["Asked for without room", -1, count, (each) => each.totals.unplaced],
  ["Model switches", -1, count, (each) => each.totals.switches],
  ["Node failures", 0, count, (each) => each.totals.node_failures],
  ["Requests interrupted", -1, count, (each) => each.totals.interrupted],
];

const OF_ROWS: readonly Of<Row>[] = [
  ["requests", 0, count, (row) => row.requests],
  ["failed", -1, count, (row) => row.failed],
  ["kept objectives", 1, share, (row) => row.service_attainment],
  ["first token late", -1, share, (row) => row.ttft_violations],
  ["first token, p95", -1, duration, (row) => row.ttft_s?.p95 ?? null],
  ["time between tokens, p95", -1, duration, (row) => row.tbt_mean_s?.p95 ?? null],
];

export const totals = (shown: readonly Shown[]): Line[] =>
  TOTALS.map(([name, better, format, of]) => ({ name, better, format, values: shown.map(({ figures }) => of(figures)) }));

/** Figures of each tier, or of each model and tier; `most`: so many rows of the first run, the busiest first. */
export function rows(shown: readonly Shown[], part: "tiers" | "models", most = Infinity): Line[] {
  const keyOf = (row: Row) => JSON.stringify([row.model, row.tier]);
  const found = shown.map(({ figures }) => new Map(figures[part].map((row) => [keyOf(row), row])));
  const keys = [...new Map(found.flatMap((each) => [...each])).entries()].slice(0, most);
  return keys.flatMap(([key, { model, tier }]) =>
    OF_ROWS.map(([what, better, format, of]) => ({
      name: `${model === null ? "" : `${model}, `}${tierWords(tier)}: ${what}`,
      better,
      format,
      values: found.map((each) => {
        const row = each.get(key);
        return row === undefined ? null : of(row);
      }),
    })),
  );
}

interface Curve {
  name: string;
  values: (number | null)[];
  dashed: boolean;
}

/** Times of the steps, in Unix seconds: those of the demand that came again in the first run. */
export function times(shown: readonly Shown[]): number[] {
  const [first] = shown;
  if (first === undefined) return [];
  const fromS = first.figures.demand_from_s ?? unixSeconds(first.run.started_at ?? first.run.created_at) - first.figures.simulated_s;
  const steps = Math.max(...shown.map(({ figures }) => Math.max(0, ...figures.series.tiers.map((tier) => tier.ttft_p95_s.length), ...Object.values(figures.series.gpus).map((gpus) => gpus.length))));
  return Array.from({ length: steps }, (_, step) => fromS + step * first.figures.series.step_s);
}

/** GPUs in use: of one run by state, of two runs all but spot. */
export function gpus(shown: readonly Shown[], length: number): Curve[] {
  return shown.flatMap(({ name, figures: { series } }, place) => {
    const states = Object.entries(series.gpus);
    if (shown.length === 1) return states.filter(([, values]) => values.some((value) => value > 0)).map(([state, values]) => curve(state, values, length, 0));
    const held = states.filter(([state]) => state !== "spot");
    const used = Array.from({ length: held[0]?.[1].length ?? 0 }, (_, step) => sum(held.map(([, values]) => values[step] ?? 0)));
    return [curve(name, used, length, place)];
  });
}

export function firstTokens(shown: readonly Shown[], length: number): Curve[] {
  return shown.flatMap(({ name, figures }, place) =>
    figures.series.tiers.map(({ tier, ttft_p95_s }) => curve(shown.length === 1 ? tierWords(tier) : `${name}, ${tierWords(tier)}`, ttft_p95_s, length, place)));
}

function curve(name: string, values: readonly (number | null)[], length: number, place: number): Curve {
  return { name, values: Array.from({ length }, (_, step) => values[step] ?? null), dashed: place > 0 };
}

/** Each change in words. */
export function inWords(changes: Changes): string[] {
  const place = (...names: (string | null | undefined)[]) => names.filter(Boolean).join(", ") || "everywhere";
  return [
    ...(changes.strategy ? [`strategy ${changes.strategy}`] : []),
    ...(changes.plan_id ? [`begins with the instances of ${changes.plan_id}`] : []),
    ...(changes.capacity ?? []).map((each) => `nodes × ${each.factor} (${place(each.region, each.gpu_type)})`),
    ...(changes.prices ?? []).map((each) => `${each.gpu_type} costs $${each.cost_per_hour} an hour`),
    ...(changes.demand ?? []).map((each) => `demand × ${each.factor} (${place(each.region, each.model)})`),
    ...(changes.lost_regions ?? []).map((each) => `${each.region} lost after ${each.after_h} h for ${each.down_h} h`),
  ];
}
