/** What a node is, in words and sums. */
import type { Schemas } from "../../api/client";

type Node = Schemas["Node"];

/** What matters most about it first. */
export function stateOf(node: Node): string {
  if (!node.alive) return "lost";
  if (node.leaving) return "leaving";
  return node.draining ? "draining" : "alive";
}

export const gpusOf = (node: Node): number => node.slots.reduce((sum, slot) => sum + slot.gpus, 0);
export const memoryOf = (node: Node): number => node.slots.reduce((sum, slot) => sum + slot.memory_bytes, 0);
