/** Numbers, times and sizes as people read them. Every number has its unit; what is not known is a dash. */

const NONE = "–";
const THIN = "\u202f";
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

type Maybe = number | null | undefined;

/** 1234567 as "1.23M", with a unit: "1.23M tokens". */
export function amount(value: Maybe, unit = ""): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const text = Math.abs(value) < 10_000 && Number.isInteger(value) ? whole.format(value) : compact.format(value);
  return unit === "" ? text : `${text}${THIN}${unit}`;
}

/** A count in full: "12,345". */
export function count(value: Maybe): string {
  return value === null || value === undefined ? NONE : whole.format(value);
}

/** "1 instance", "2 instances". */
export function counted(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** A share of one as percent: 0.987 is "98.7 %". */
export function percent(share: Maybe, digits = 1): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE;
  return `${(share * 100).toFixed(digits)}${THIN}%`;
}

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** A size in bytes, in powers of 1024. */
export function bytes(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const power = value < 1 ? 0 : Math.min(SIZES.length - 1, Math.floor(Math.log2(value) / 10));
  return `${(value / 1024 ** power).toFixed(power === 0 ? 0 : 1)}${THIN}${SIZES[power]}`;
}

/** A length of time in seconds: "320 ms", "4.2 s", "3 min 20 s", "2 h 5 min", "3 d 4 h". */
export function duration(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const sign = value < 0 ? "−" : "";
  const seconds = Math.abs(value);
  if (seconds < 1) return `${sign}${Math.round(seconds * 1000)}${THIN}ms`;
  if (seconds < 10) return `${sign}${seconds.toFixed(1)}${THIN}s`;
  if (seconds < 90) return `${sign}${Math.round(seconds)}${THIN}s`;
  return sign + two(seconds, [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]]);
}

function two(seconds: number, units: [number, string][]): string {
  const first = units.findIndex(([length]) => seconds >= length);
  const [length, name] = units[first] ?? [1, "s"];
  const next = units[first + 1];
  const head = `${Math.floor(seconds / length)}${THIN}${name}`;
  const rest = next === undefined ? 0 : Math.floor((seconds % length) / next[0]);
  return next === undefined || rest === 0 ? head : `${head} ${rest}${THIN}${next[1]}`;
}

/** An amount of money in an hour; the currency is that of the GPU types' prices. */
export function price(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return `${value.toFixed(Math.abs(value) < 100 ? 2 : 0)}${THIN}/h`;
}

/** An id that ends as the whole one does: the beginnings of ids made in one hour are equal. */
export function shortId(id: string): string {
  const [kind, rest = ""] = id.split("_", 2);
  return rest.length <= 10 ? id : `${kind}_…${rest.slice(-8)}`;
}

/** The first few of some names, and how many more there are. */
export function someOf(names: readonly string[], most: number): string {
  const more = names.length - most;
  return names.length === 0 ? NONE : names.slice(0, most).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

/** Unix seconds of what the API sends: seconds, or an ISO time. */
export function unixSeconds(time: number | string): number {
  return typeof time === "number" ? time : Date.parse(time) / 1000;
}

const local = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "short" });
const dayAndClock = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const yearToClock = new Intl.DateTimeFormat("en-GB", {
  day: "numeric",
  month: "short",
  year: "numeric",
  hour: "2-digit",
  minute: "2-digit",
});

/** A moment in the viewer's zone: today's without its day, this year's without its year. */
export function moment(seconds: number, now = Date.now() / 1000): string {
  const date = new Date(seconds * 1000);
  const today = new Date(now * 1000);
  if (date.toDateString() === today.toDateString()) return clock.format(date);
  return (date.getFullYear() === today.getFullYear() ? dayAndClock : yearToClock).format(date);
}

/** The same moment in full, in the viewer's zone and in UTC. */
export function momentInFull(seconds: number): string {
  const date = new Date(seconds * 1000);
  return `${local.format(date)} (${date.toISOString().replace("T", " ").slice(0, 19)} UTC)`;
}

/** How long ago, or in how long. */
export function distance(seconds: number, now = Date.now() / 1000): string {
  const apart = seconds - now;
  if (Math.abs(apart) < 1) return "now";
  const length = duration(Math.abs(Math.round(apart)));
  return apart < 0 ? `${length} ago` : `in ${length}`;
}
