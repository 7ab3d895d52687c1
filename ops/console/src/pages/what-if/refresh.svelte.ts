/** Ask again every two seconds while a run that is shown is queued or running, and the page is seen. */

const EVERY_MS = 2000;

export function whileOpen(open: () => boolean, ask: () => Promise<void>): void {
  const isOpen = $derived(open());
  $effect(() => {
    if (!isOpen) return;
    const timer = setInterval(() => {
      if (!document.hidden) void ask();
    }, EVERY_MS);
    return () => clearInterval(timer);
  });
}
