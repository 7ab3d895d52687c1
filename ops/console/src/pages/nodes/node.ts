/** What a node has, in sums. */
import type { Schemas } from "../../api/client";

type Node = Schemas["Node"];

export const gpusOf = (node: Node): number => node.slots.reduce((sum, slot) => sum + slot.gpus, 0);
export const memoryOf = (node: Node): number => node.slots.reduce((sum, slot) => sum + slot.memory_bytes, 0);

/** Of how many hosts the GPUs of a slot are, and which of these are not connected. */
export const hostsOf = (slot: Schemas["Slot"], node: Schemas["NodeDetail"]): string => {
  const absent = node.live?.other_hosts.filter((each) => each.slot === slot.index && !each.connected) ?? [];
  const without = absent.length > 0 ? `, without host ${absent.map((each) => each.host).join(", ")}` : "";
  return ` of ${slot.hosts} hosts${without}`;
};
