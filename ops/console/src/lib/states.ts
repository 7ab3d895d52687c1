/** How good a state is. */
export type Kind = "good" | "warn" | "bad" | "idle";

export const MARKS: Record<Kind, string> = { good: "●", warn: "◐", bad: "▲", idle: "○" };

const KINDS: Record<Kind, readonly string[]> = {
  good: ["ok", "ready", "applied", "completed", "alive", "kept", "approved", "live", "done"],
  warn: ["loading", "draining", "applying", "draft", "waiting", "degraded", "validating", "in_progress", "finalizing", "cancelling", "starting", "late", "lent", "pending", "running", "queued", "paused"],
  bad: ["failed", "lost", "unavailable", "away", "expired", "unhealthy", "error", "missed", "rejected", "refused", "rolled_back"],
  idle: [],
};

/** A state that is not known here is neither good nor bad. */
export function kindOf(state: string): Kind {
  return (Object.keys(KINDS) as Kind[]).find((kind) => KINDS[kind].includes(state)) ?? "idle";
}
