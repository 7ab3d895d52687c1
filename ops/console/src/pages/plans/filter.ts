/** The filter of a plan's changes, as the address has it and the API takes it. */
import type { Schemas } from "../../api/client";
import { here } from "../../lib/router.svelte";
import { CONSTRAINTS } from "./words";

export interface ChangeFilter {
  only_changes: boolean;
  model: string | null;
  region: string | null;
  gpu_type: string | null;
  constraint: Schemas["Constraint"] | null;
  words: string | null;
}

export const GROUPINGS = [["region", "region"], ["model", "model"], ["gpu_type", "GPU type"], ["constraint", "what holds them"]] as const;
export type Grouping = (typeof GROUPINGS)[number][0];

/** How changes are grouped. */
export function grouping(): Grouping {
  return GROUPINGS.find(([name]) => name === here.get("by"))?.[0] ?? "region";
}

/** The filter of the address as text: the same text while other parts of the address change. */
export function filterKey(): string {
  const filter: ChangeFilter = {
    only_changes: here.get("all") === "",
    model: here.get("model") || null,
    region: here.get("region") || null,
    gpu_type: here.get("gpu_type") || null,
    constraint: CONSTRAINTS.find(([name]) => name === here.get("constraint"))?.[0] ?? null,
    words: here.get("words") || null,
  };
  return JSON.stringify(filter);
}

export const filterOf = (key: string): ChangeFilter => JSON.parse(key) as ChangeFilter;
