/** Keys of the console: `/` to search, `?` for help, and `g` with a letter to go to a page. */
import { go } from "./router.svelte";
import { PAGES } from "../pages";

const PAIR_MS = 1200;

export interface Actions {
  search: () => void;
  help: () => void;
}

/** Listen until the returned function is called. Keys that are typed into a field stay there. */
export function listen(actions: Actions): () => void {
  let leaderAt = 0;
  const press = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (leaderAt > 0 && event.timeStamp - leaderAt < PAIR_MS) {
      leaderAt = 0;
      const page = PAGES.find(({ key }) => key === event.key);
      if (page !== undefined) {
        event.preventDefault();
        go(`#/${page.path}`);
      }
      return;
    }
    leaderAt = event.key === "g" ? event.timeStamp : 0;
    if (event.key === "/" || event.key === "?") {
      event.preventDefault();
      if (event.key === "/") actions.search();
      else actions.help();
    }
  };
  window.addEventListener("keydown", press);
  return () => window.removeEventListener("keydown", press);
}

/** A field of a dialog that was just closed has the focus until the next frame: nobody types into what is not seen. */
function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.checkVisibility() && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}
