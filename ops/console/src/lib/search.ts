/** What a name in the search field may mean. Names come from the API, by what they contain. */
import { answer, api } from "../api/client";
import { PAGES } from "../pages";
import { href, linkTo } from "./router.svelte";
import { session } from "./session.svelte";

export interface Found {
  name: string;
  kind: string;
  link: string;
}

const ROWS_MAX = 8;
const IDS: readonly [RegExp, string, string][] = [
  [/^plan_/, "plan", "plans"],
  [/^batch_/, "batch", "batches"],
  [/^req_|^chatcmpl-|^resp_/, "request", "requests"],
];

/** Pages first, then things; an id goes straight to its page. */
export async function find(words: string): Promise<Found[]> {
  const wanted = words.toLowerCase();
  const pages = PAGES.filter((page) => session.may(page.role) && page.title.toLowerCase().includes(wanted)).map(
    (page) => ({ name: page.title, kind: "page", link: `#/${page.path}` }),
  );
  const byId = IDS.filter(([shape]) => shape.test(words)).map(([, kind, page]) => ({ name: words, kind, link: linkTo(page, words) }));
  if (words.length < 2) return [...byId, ...pages];
  const { data } = await answer(api.GET("/admin/search", { params: { query: { words, limit: ROWS_MAX } } }));
  const things = data.map(({ kind, name }) => ({ name, kind, link: linkOf(kind, name) }));
  return [...byId, ...pages, ...things];
}

function linkOf(kind: string, name: string): string {
  if (kind === "region") return href("/nodes", { region: name });
  return linkTo(`${kind}s`, name);
}
