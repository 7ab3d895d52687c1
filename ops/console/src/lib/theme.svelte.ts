/** Dark or light: what the system prefers, until somebody chooses. */

type Choice = "system" | "light" | "dark";

const KEY = "tidepool.theme";
const CHOICES: readonly Choice[] = ["system", "light", "dark"];

class Theme {
  choice = $state<Choice>(stored());

  /** The next choice, in turn. */
  next(): void {
    this.choice = CHOICES[(CHOICES.indexOf(this.choice) + 1) % CHOICES.length] ?? "system";
    localStorage.setItem(KEY, this.choice);
    this.apply();
  }

  apply(): void {
    document.documentElement.dataset["theme"] = this.choice;
  }
}

function stored(): Choice {
  const choice = localStorage.getItem(KEY) as Choice | null;
  return choice !== null && CHOICES.includes(choice) ? choice : "system";
}

export const theme = new Theme();
