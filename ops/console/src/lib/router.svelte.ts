/** Where in the console we are: the part of the address behind `#`, as a path and its query. Every view is a link. */

export class Location {
  path = $state("/");
  query = $state(new URLSearchParams());

  constructor() {
    this.#read();
    window.addEventListener("hashchange", () => this.#read());
  }

  /** Parts of the path, decoded. */
  get parts(): string[] {
    return this.path.split("/").filter(Boolean).map(decoded);
  }

  get(name: string): string {
    return this.query.get(name) ?? "";
  }

  /** Change parts of the query; empty ones go. Typing in a filter makes no history of its own. */
  set(changes: Record<string, string>): void {
    const query = new URLSearchParams(this.query);
    for (const [name, value] of Object.entries(changes)) {
      if (value === "") query.delete(name);
      else query.set(name, value);
    }
    history.replaceState(null, "", href(this.path, query));
    this.query = query;
  }

  #read(): void {
    const [path = "", query = ""] = location.hash.slice(1).split("?", 2);
    this.path = path || "/";
    this.query = new URLSearchParams(query);
  }
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // an address that somebody typed
  }
}

/** The link to a path with a query. */
export function href(path: string, query: Record<string, string> | URLSearchParams = {}): string {
  const text = new URLSearchParams(query).toString();
  return text === "" ? `#${path}` : `#${path}?${text}`;
}

/** The link to one thing, whose name may hold any character. */
export function linkTo(page: string, ...names: string[]): string {
  return `#/${[page, ...names.map(encodeURIComponent)].join("/")}`;
}

/** Go to a link of `href` or `linkTo`. */
export function go(link: string): void {
  location.hash = link;
}

export const here = new Location();
