/** Tiers of service, as the API names them and as people call them. */

type Tier = "IW-F" | "IW-N" | "NIW";

const WORDS: Record<Tier, string> = { "IW-F": "priority", "IW-N": "default", NIW: "flex and batch" };

/** Tiers to choose from, with their names. */
export const TIERS: readonly (readonly [Tier, string])[] = (Object.keys(WORDS) as Tier[]).map((tier) => [tier, WORDS[tier]]);

/** The tier of that name; what is none is undefined. */
export function tierOf(name: string): Tier | undefined {
  return TIERS.find(([tier]) => tier === name)?.[0];
}

export function tierWords(name: string | null | undefined): string {
  const tier = tierOf(name ?? "");
  return tier === undefined ? (name ?? "–") : WORDS[tier];
}
