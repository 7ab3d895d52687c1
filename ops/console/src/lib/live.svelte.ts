/** What the API sends by itself: one stream of server-sent events for the whole console, joined again when it breaks. */
import { answer, api, type Schemas } from "../api/client";

type Overview = Schemas["Overview"];

const LATE_MS = 15_000;
const RETRY_MS = 3000;

class Live {
  overview = $state<Overview | null>(null);
  /** When the last event came, by this machine's clock in milliseconds. */
  heardAt = $state(0);
  connected = $state(false);
  #source: EventSource | null = null;
  #retry: ReturnType<typeof setTimeout> | undefined;

  /** Whether what is shown may be old. */
  isLate(now: number): boolean {
    return this.heardAt > 0 && (!this.connected || now - this.heardAt > LATE_MS);
  }

  open(): void {
    if (this.#source !== null) return;
    const source = new EventSource(new URL("../admin/live", document.baseURI));
    source.addEventListener("open", () => (this.connected = true));
    source.addEventListener("error", () => {
      this.connected = false;
      if (source.readyState === EventSource.CLOSED) this.#again();
    });
    source.addEventListener("away", () => (this.connected = false)); // the gateway answers, and cannot look
    source.addEventListener("overview", (event) => {
      this.overview = JSON.parse(event.data) as Overview;
      this.heardAt = Date.now();
      this.connected = true;
    });
    this.#source = source;
  }

  close(): void {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
    this.connected = false;
    this.overview = null;
    this.heardAt = 0;
  }

  /** A refused stream is not joined again by the browser: ask why, which also tells an ended session. */
  #again(): void {
    this.#source?.close();
    this.#source = null;
    this.#retry = setTimeout(() => this.open(), RETRY_MS);
    answer(api.GET("/admin/overview", {}))
      .then((overview) => (this.overview = overview))
      .catch(() => undefined);
  }
}

export const live = new Live();
