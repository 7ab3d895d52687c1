/** A list of the API that comes in pages: the first one at once, the next when somebody scrolls there. */
import { Problem } from "../api/client";

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

  async #take(after: string | number | null): Promise<void> {
    const asked = ++this.#asked;
    this.loading = true;
    try {
      const page = await this.ask(after);
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

/** Pages for a component: the first page comes anew when what `ask` reads changes. */
export function pages<Row>(ask: (after: string | number | null) => Promise<Page<Row>>): Pages<Row> {
  const found = new Pages(ask);
  $effect(() => void found.load());
  return found;
}
