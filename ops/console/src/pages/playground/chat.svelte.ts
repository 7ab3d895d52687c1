/** A conversation with one model: each answer is streamed, measured, and shown as the text that it is. */
import { Problem, problemOf } from "../../api/client";
import { session } from "../../lib/session.svelte";
import { eventsOf } from "./events";

export interface Manner {
  system: string;
  temperature: number;
  tokensMax: number;
}

export interface Message {
  role: "user" | "assistant";
  text: string;
}

/** How an answer came. Seconds are from the moment it was asked for. */
export interface Measured {
  firstTokenS: number | null;
  endS: number | null;
  tokens: number | null;
  /** Tokens a second from the first one on. */
  tokensPerS: number | null;
  region: string;
  requestId: string;
  finish: string;
}

interface Chunk {
  choices?: { delta?: { content?: string | null; reasoning_content?: string | null }; finish_reason?: string | null }[];
  usage?: { completion_tokens?: number } | null;
  error?: { message?: string; code?: string };
}

const NOTHING: Measured = { firstTokenS: null, endS: null, tokens: null, tokensPerS: null, region: "", requestId: "", finish: "" };

export class Chat {
  messages = $state<Message[]>([]);
  measured = $state<Measured>(NOTHING);
  problem = $state<Problem | null>(null);
  busy = $state(false);
  #abort: AbortController | null = null;

  async ask(model: string, words: string, how: Manner): Promise<void> {
    this.messages.push({ role: "user", text: words });
    const sent = this.messages.map(({ role, text }) => ({ role, content: text }));
    if (how.system !== "") sent.unshift({ role: "system" as "user", content: how.system });
    this.messages.push({ role: "assistant", text: "" });
    this.problem = null;
    this.measured = NOTHING;
    this.busy = true;
    this.#abort = new AbortController();
    const began = performance.now();
    try {
      await this.#stream({ model, messages: sent, temperature: how.temperature, max_tokens: how.tokensMax }, began);
    } catch (error) {
      if (this.#abort.signal.aborted) this.measured = { ...this.measured, finish: "stopped" };
      else this.problem = error instanceof Problem ? error : new Problem(0, "broken", "The answer broke off: the gateway cannot be reached.");
    } finally {
      this.busy = false;
      this.#settle(began);
    }
  }

  stop(): void {
    this.#abort?.abort();
  }

  clear(): void {
    this.messages = [];
    this.measured = NOTHING;
    this.problem = null;
  }

  async #stream(body: object, began: number): Promise<void> {
    const response = await fetch(new URL("../v1/chat/completions", document.baseURI), {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-CSRF-Token": session.csrf },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal: this.#abort?.signal ?? null,
    });
    this.measured = { ...this.measured, requestId: response.headers.get("x-request-id") ?? "", region: response.headers.get("x-tidepool-region") ?? "" };
    if (!response.ok || response.body === null) {
      const problem = await problemOf(response);
      if (response.status === 401) session.ended(problem);
      throw problem;
    }
    for await (const event of eventsOf(response.body)) {
      if (event !== "[DONE]") this.#take(JSON.parse(event) as Chunk, began);
    }
  }

  #take(chunk: Chunk, began: number): void {
    if (chunk.error !== undefined) throw new Problem(500, chunk.error.code ?? "", chunk.error.message ?? "The answer broke off.");
    const [choice] = chunk.choices ?? [];
    const text = `${choice?.delta?.reasoning_content ?? ""}${choice?.delta?.content ?? ""}`;
    const last = this.messages.at(-1);
    if (text !== "" && last !== undefined) {
      last.text += text;
      this.measured.firstTokenS ??= (performance.now() - began) / 1000;
    }
    if (choice?.finish_reason) this.measured.finish = choice.finish_reason;
    if (chunk.usage?.completion_tokens !== undefined) this.measured.tokens = chunk.usage.completion_tokens;
  }

  #settle(began: number): void {
    const measured = this.measured;
    const endS = (performance.now() - began) / 1000;
    const streamS = measured.firstTokenS === null ? 0 : endS - measured.firstTokenS;
    const tokensPerS = measured.tokens !== null && measured.tokens > 1 && streamS > 0 ? (measured.tokens - 1) / streamS : null;
    this.measured = { ...measured, endS, tokensPerS };
    if (this.messages.at(-1)?.text === "") this.messages.pop(); // no answer came: the next try does not send an empty one
  }
}
