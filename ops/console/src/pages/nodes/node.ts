/** What a node has, in sums. */
import type { Schemas } from "../../api/client";

type Node = Schemas["Node"];

export const gpusOf = (node: Node): number => node.slots.reduce((sum, slot) => sum + slot.gpus, 0);
export const memoryOf = (node: Node): number => node.slots.reduce((sum, slot) => sum + slot.memory_bytes, 0);
