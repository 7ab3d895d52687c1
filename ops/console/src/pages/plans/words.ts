/** What a plan's changes mean, in words. */
import type { Schemas } from "../../api/client";
import { count, price } from "../../lib/format";

/** Which row of the problem makes a count necessary, and what that means. */
export const CONSTRAINTS: readonly (readonly [Schemas["Constraint"], string, string])[] = [
  ["home", "demand at home", "The region itself must be able to serve this share of its own peak."],
  ["global", "demand of all regions", "All regions together must be able to serve the model's peak."],
  ["minimum", "a minimum", "The endpoint's limits ask for so many."],
  ["maximum", "a maximum", "The endpoint's limits allow no more."],
  ["pin", "a pin", "An operator has pinned the endpoint to so many."],
  ["capacity", "no more GPUs", "There are no more GPUs of this type in the region."],
  ["cost", "cost", "Nothing needs more: it is cheaper so."],
  ["none", "nothing", "Nothing needs a change here; it stands within the solver's gap."],
];

const NAMES = new Map<string, string>(CONSTRAINTS.map(([name, words]) => [name, words]));
const MEANINGS = new Map<string, string>(CONSTRAINTS.map(([name, , meaning]) => [name, meaning]));

export const constraintName = (constraint: string): string => NAMES.get(constraint) ?? constraint;
export const constraintMeaning = (constraint: string): string => MEANINGS.get(constraint) ?? "";

/** "+3", "−2", "0". */
export function signed(change: number, text: (value: number) => string = count): string {
  return change === 0 ? "0" : `${change > 0 ? "+" : "−"}${text(Math.abs(change))}`;
}

/** What leaving a cell as it was would add to the plan's objective. */
export function costIfNot(cost: number | null): string {
  return cost === null || cost === 0 ? "–" : price(cost);
}

/** How a plan came to be, or stopped to be, in force. */
export const ACTIONS: Record<string, string> = {
  "plan.create": "drafted it",
  "plan.apply": "applied it",
  "plan.approve": "approved it",
  "plan.reject": "rejected it",
  "plan.rollback": "rolled it back",
};
