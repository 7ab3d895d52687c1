/** A list of the API that comes in pages: the first one at once, the next when somebody scrolls there. */
import { Problem } from "../api/client";
import { askWhileAway } from "./again.svelte";

interface Page<Row> {
  data: Row[];
  has_more: boolean;
  next: string | number | null;
}

export class Pages<Row> {
  rows = $state.raw<Row[]>([]);
  more = $state(false);
  loading = $state(false);
  problem = $state<Problem | null>(null);
  /** Whether the first page has come: only then an empty list is empty. */
  known = $state(false);
  #next: string | number | null = null;
  #asked = 0;

  constructor(private readonly ask: (after: string | number | null) => Promise<Page<Row>>) {}

  async load(): Promise<void> {
    await this.#take(null);
  }

  async loadMore(): Promise<void> {
    if (this.more && !this.loading) await this.#take(this.#next);
  }

  /** Ask for as many rows as are here again, and show them all at once: nobody's place in the list is lost. */
  async refresh(): Promise<void> {
    if (!this.loading) await this.#take(null, this.rows.length);
  }

  async #take(after: string | number | null, atLeast = 0): Promise<void> {
    const asked = ++this.#asked;
    this.loading = true;
    try {
      let page = await this.ask(after);
      while (page.has_more && page.data.length < atLeast && asked === this.#asked) {
        const more = await this.ask(page.next);
        page = { ...more, data: [...page.data, ...more.data] };
      }
      if (asked !== this.#asked) return;
      this.rows = after === null ? page.data : [...this.rows, ...page.data];
      this.more = page.has_more;
      this.#next = page.next;
      this.problem = null;
      this.known = true;
    } catch (problem) {
      if (asked !== this.#asked) return;
      if (!(problem instanceof Problem)) throw problem;
      this.problem = problem;
    } finally {
      if (asked === this.#asked) this.loading = false;
    }
  }
}

/**
 * Pages for a component: the first page comes anew when what `ask` reads changes, and what is shown every `everyS`
 * seconds while the page is seen. 0: only then, and while a server is away.
 */
export function pages<Row>(ask: (after: string | number | null) => Promise<Page<Row>>, everyS = 0): Pages<Row> {
  const found = new Pages(ask);
  askWhileAway(found, () => found.refresh());
  $effect(() => {
    void found.load();
    if (everyS === 0) return;
    const timer = setInterval(() => {
      if (!document.hidden) void found.refresh();
    }, everyS * 1000);
    return () => clearInterval(timer);
  });
  return found;
}
