/** Asking again and again, while there is reason to and the page is seen. */

const AWAY_EVERY_MS = 3000;

/** Ask every `everyMs` while `holds()`. */
export function askWhile(holds: () => boolean, ask: () => Promise<void>, everyMs: number): void {
  const isHolding = $derived(holds());
  $effect(() => {
    if (!isHolding) return;
    const timer = setInterval(() => {
      if (!document.hidden) void ask();
    }, everyMs);
    return () => clearInterval(timer);
  });
}

/** Ask every few seconds while a server is away that the answer needs: the page heals by itself. */
export function askWhileAway(found: { problem: { isAway: boolean } | null }, ask: () => Promise<void>): void {
  askWhile(() => found.problem?.isAway === true, ask, AWAY_EVERY_MS);
}
