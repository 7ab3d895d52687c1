/** Columns of a plan's cells. */
import type { Column } from "../../lib/table";

export function cellColumns<Row>(): readonly Column<Row>[] {
  return [
    { name: "model", title: "Model" },
    { name: "region", title: "Region" },
    { name: "gpu", title: "GPU type" },
    { name: "diff", title: "Instances" },
    { name: "constraint", title: "Held by", hint: "What makes the count necessary" },
    { name: "cost", title: "Cost if not", hint: "What leaving it as it was would add to the objective, per hour", number: true },
    { name: "why", title: "Why" },
  ];
}
