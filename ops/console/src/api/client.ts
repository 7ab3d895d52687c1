/** Calls of the API, typed by its own description. Every failure is a `Problem`, also that the gateway does not answer. */
import createClient, { type Middleware } from "openapi-fetch";

import { session } from "../lib/session.svelte";
import type { components, paths } from "./schema";

export type Schemas = components["schemas"];

/** The code of a refusal for want of an instance, while every server answers. */
const NO_CAPACITY = "no_capacity";
export const CSRF_HEADER = "X-CSRF-Token";
const SAFE = new Set(["GET", "HEAD"]);

/** What the API said instead of an answer (RFC 9457), in words that a person can act on. */
export class Problem extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly param: string | null = null,
    readonly extra: Record<string, unknown> = {},
  ) {
    super(message);
    this.name = "Problem";
  }

  /** Whether a server does not answer, which passes by itself. */
  get isAway(): boolean {
    return this.status === 0 || (this.status === 503 && this.code !== NO_CAPACITY);
  }

  /** Whether the session is another one than this page knows: the person has signed in again in another tab. */
  get isOfAnotherSession(): boolean {
    return this.status === 403 && this.param === CSRF_HEADER;
  }

  /** What to try, where the status alone says it. */
  get advice(): string {
    if (this.isOfAnotherSession) return "You have signed in again in another tab. Try again.";
    if (this.code === NO_CAPACITY) return "No instance can take this now: wait for one, or choose another model.";
    if (this.status === 0) return "The gateway does not answer. What you see may be old until it does.";
    if (this.status === 403) return "Your role may not do this. An administrator can change it.";
    if (this.status === 409) return "Something has changed meanwhile. Look at the present state, and try again.";
    if (this.status === 503) return "A server that this needs is away. What you see may be old until it is back.";
    return "";
  }
}

/** The problem in a response that is no success. */
export async function problemOf(response: Response): Promise<Problem> {
  const text = await response.text();
  try {
    const body = JSON.parse(text) as Record<string, unknown>;
    const error = (body["error"] ?? body) as Record<string, unknown>; // under /v1 in OpenAI's shape
    const words = error["detail"] ?? error["message"] ?? response.statusText;
    return new Problem(response.status, String(error["code"] ?? ""), String(words), (error["param"] as string) ?? null, body);
  } catch {
    return new Problem(response.status, "", text.slice(0, 300) || response.statusText || `HTTP ${response.status}`);
  }
}

const credentials: Middleware = {
  onRequest({ request }) {
    if (!SAFE.has(request.method)) request.headers.set(CSRF_HEADER, session.csrf);
    return request;
  },
  async onResponse({ response }) {
    if (response.ok) return response;
    const problem = await problemOf(response);
    session.note(problem);
    throw problem;
  },
  onError() {
    return new Problem(0, "unreachable", "The gateway cannot be reached.");
  },
};

export const api = createClient<paths>({ baseUrl: new URL("..", document.baseURI).pathname.replace(/\/$/, "") });
api.use(credentials);

/** The answer of a call, or its problem, thrown. */
export async function answer<Data>(call: Promise<{ data?: Data }>): Promise<NonNullable<Data>> {
  const { data } = await call;
  return data as NonNullable<Data>;
}
