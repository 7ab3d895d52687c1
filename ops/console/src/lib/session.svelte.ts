/** Who is signed in, and what that person may do. */
import { CSRF_HEADER, Problem, problemOf } from "../api/client";

export type Role = "viewer" | "operator" | "admin";

export interface Person {
  name: string;
  role: Role;
  tenant: string;
  source: string;
  csrf_token: string;
  signed_in_s: number;
  idle_ends_s: number;
  ends_s: number;
}

interface SignInWays {
  key: boolean;
  oidc: string | null;
}

/** `provider_logout_url`: where the session at the OpenID provider ends, if there is one. */
interface SignedOut {
  provider_logout_url: string | null;
}

const RANK: Record<Role, number> = { viewer: 0, operator: 1, admin: 2 };
const SEEN_EVERY_MS = 60_000;

class Session {
  person = $state<Person | null>(null);
  ways = $state<SignInWays>({ key: true, oidc: null });
  problem = $state<Problem | null>(null);
  known = $state(false);
  #seenAt = 0;

  get csrf(): string {
    return this.person?.csrf_token ?? "";
  }

  /** Whether the person has the rights of a role. The API refuses what it may not do anyway. */
  may(role: Role): boolean {
    return this.person !== null && RANK[this.person.role] >= RANK[role];
  }

  /** Ask who is signed in. A gateway that does not answer leaves what is known. */
  async load(): Promise<void> {
    try {
      this.#signedIn(await this.#send("GET", "session"));
    } catch (problem) {
      if (problem instanceof Problem && problem.status === 401) this.ended(null, problem);
      else if (problem instanceof Problem) this.problem = problem;
      else throw problem;
    } finally {
      this.known = true;
    }
  }

  async signIn(secret: { key: string } | { link: string }): Promise<void> {
    this.#signedIn(await this.#send("POST", "session", secret));
  }

  async signOut(everywhere: boolean): Promise<void> {
    const { provider_logout_url: provider } = await this.#send<SignedOut>("DELETE", everywhere ? "sessions" : "session");
    if (provider === null) await this.load();
    else location.assign(provider);
  }

  /** The person did something: the idle limit begins anew. Said at most once a minute. */
  seen(): void {
    if (this.person === null || Date.now() - this.#seenAt < SEEN_EVERY_MS) return;
    this.#seenAt = Date.now();
    this.#send("POST", "session/seen").then(
      (person) => this.#signedIn(person),
      (problem: unknown) => problem instanceof Problem && this.note(problem),
    );
  }

  /** What a refusal says of the session: it is over, or another one. */
  note(problem: Problem): void {
    if (problem.status === 401) this.ended(problem);
    else if (problem.isOfAnotherSession) void this.load();
  }

  /** The session is over, or there was none. `answer`: the refusal that names the ways to sign in. */
  ended(problem: Problem | null, answer: Problem | null = problem): void {
    if (this.person !== null) problem ??= new Problem(401, "ended", "Your session has ended. Sign in again.");
    this.person = null;
    this.problem = problem;
    const ways = answer?.extra["sign_in"];
    if (Array.isArray(ways)) {
      const name = answer?.extra["oidc_name"];
      this.ways = { key: ways.includes("key"), oidc: ways.includes("oidc") ? String(name ?? "single sign-on") : null };
    }
  }

  #signedIn(person: Person): void {
    this.person = person;
    this.problem = null;
  }

  async #send<Data = Person>(method: string, path: string, body?: object): Promise<Data> {
    const headers: Record<string, string> = { [CSRF_HEADER]: this.csrf };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response: Response;
    try {
      response = await fetch(new URL(path, document.baseURI), { method, headers, body: JSON.stringify(body) ?? null });
    } catch {
      throw new Problem(0, "unreachable", "The gateway cannot be reached.");
    }
    if (!response.ok) throw await problemOf(response);
    return (await response.json()) as Data;
  }
}

export const session = new Session();
