/** Why a request was served where it was, in words. */
import type { Schemas } from "../../api/client";
import { count, percent } from "../../lib/format";

type Routed = Pick<Schemas["LoggedRequest"], "nodes" | "region" | "origin" | "utilization" | "cached_tokens" | "prompt_tokens">;

export function routeWords(request: Routed): string {
  if (request.nodes.length === 0 || request.region === null) return "It was sent to no instance.";
  const words = [
    request.origin === null || request.origin === request.region
      ? `It was served in ${request.region}, its own region.`
      : `It came from ${request.origin} and was served in ${request.region}: every region that ${request.origin} prefers had no instance for it, was fuller, or had cached less of its prompt.`,
  ];
  if (request.utilization !== null) words.push(`The model's KV memory there was used to ${percent(request.utilization, 0)} when its instance was chosen.`);
  if (request.cached_tokens) words.push(`About ${count(request.cached_tokens)} of its ${count(request.prompt_tokens)} prompt tokens were expected to be cached on that instance.`);
  return words.join(" ");
}
