/** Data of the API that a page shows: asked for again in good time, and kept on the page while it cannot be had. */
import { Problem } from "../api/client";
import { askWhileAway } from "./again.svelte";

export class Resource<Data> {
  data = $state<Data | null>(null);
  problem = $state<Problem | null>(null);
  loading = $state(false);
  /** When the data came, in milliseconds. */
  at = $state(0);
  #asked = 0;

  constructor(private readonly ask: () => Promise<Data>) {}

  /** Ask now. Of several answers that cross, the last one asked for counts. */
  async load(): Promise<void> {
    const asked = ++this.#asked;
    this.loading = true;
    try {
      const data = await this.ask();
      if (asked !== this.#asked) return;
      this.data = data;
      this.problem = null;
      this.at = Date.now();
    } catch (problem) {
      if (asked !== this.#asked) return;
      if (!(problem instanceof Problem)) throw problem;
      this.problem = problem;
    } finally {
      if (asked === this.#asked) this.loading = false;
    }
  }

  /** Forget what was shown: it was of something else. */
  clear(): void {
    this.#asked++;
    this.data = null;
    this.problem = null;
  }
}

/**
 * A resource for a component: loads when what `ask` reads changes, and then every `everyS` seconds while the page is
 * seen. 0: only then, and while a server is away.
 */
export function resource<Data>(ask: () => Promise<Data>, everyS = 0): Resource<Data> {
  const found = new Resource(ask);
  askWhileAway(found, () => found.load());
  $effect(() => {
    void found.load();
    if (everyS === 0) return;
    const timer = setInterval(() => {
      if (!document.hidden) void found.load();
    }, everyS * 1000);
    return () => clearInterval(timer);
  });
  return found;
}
