/** Events in words: what happened, and where to look. */
import type { Schemas } from "../api/client";
import { linkTo } from "./router.svelte";

type Event = Schemas["Event"];

/** Where the subject of an event is shown; an instance has no page but its model's. */
export function linkOf(event: Event): string | null {
  if (event.kind === "plan") return linkTo("plans", event.subject);
  if (event.kind === "node") return linkTo("nodes", event.subject);
  return event.model === null ? null : linkTo("models", event.model);
}

/** The subject of an event as a person knows it. */
export function nameOf(event: Event): string {
  if (event.kind === "instance") return event.model ?? event.subject;
  return event.subject;
}

/** Events that follow each other and say the same of one model in one region are one line. */
export interface EventLine {
  first: Event;
  count: number;
}

export function lines(events: readonly Event[]): EventLine[] {
  const found: EventLine[] = [];
  for (const event of events) {
    const last = found.at(-1);
    const same = last !== undefined && keyOf(last.first) === keyOf(event);
    if (same) last.count += 1;
    else found.push({ first: event, count: 1 });
  }
  return found;
}

function keyOf(event: Event): string {
  const subject = event.kind === "instance" ? [event.model, event.region] : [event.subject];
  return [event.kind, event.what, ...subject, event.message].join("\n");
}
