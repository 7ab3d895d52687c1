/** Shares of an alias's models, as people read them. */
const TENTHS = 10;

/** Each model with its share of the sum of the weights. */
export function shares(targets: Readonly<Record<string, number>>): [string, string][] {
  const whole = Object.values(targets).reduce((sum, weight) => sum + weight, 0);
  return Object.entries(targets).map(([model, weight]) => [model, percent(weight / whole)]);
}

/** The shares in a text such as "5, 25, 100"; null where it is none that rises from 1 to at most 100. */
export function steps(text: string): number[] | null {
  const found = text.split(",").map((part) => Number(part.trim() || Number.NaN));
  const rises = found.every((share, place) => Number.isInteger(share) && share > (found[place - 1] ?? 0) && share <= 100);
  return rises ? found : null;
}

function percent(share: number): string {
  return `${Math.round(share * 100 * TENTHS) / TENTHS} %`;
}
