/** Runs of a worker over several answers: those that are told again are kept once, and old ones go. */
import type { Schemas } from "../../api/client";

export type Run = Schemas["PoolRun"];
export const SPAN_S = 120;
const SAME_S = 0.25; // heartbeats arrive with so much delay, more or less

/** What was known until the first of `more` began, and then `more`: it tells the rest again. */
export function merged(known: readonly Run[], more: readonly Run[]): readonly Run[] {
  const first = more[0];
  const last = more.at(-1);
  if (first === undefined || last === undefined) return known;
  const oldest = last.began_s + last.lasted_s - SPAN_S;
  const before = known.filter((run) => run.began_s < first.began_s - SAME_S && run.began_s + run.lasted_s > oldest);
  return [...before, ...more];
}
