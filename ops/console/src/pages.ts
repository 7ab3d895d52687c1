/** The pages of the console, in the order of its menu. A page is loaded when it is first opened. */
import type { Component } from "svelte";

import type { Role } from "./lib/session.svelte";

export interface Page {
  /** First part of the address. */
  path: string;
  title: string;
  group: "Fleet" | "Work" | "Planning" | "Access";
  /** After `g`. */
  key: string;
  /** Who may see it; others have no link to it, and the API refuses them. */
  role: Role;
  load: () => Promise<{ default: Component }>;
}

export const PAGES: readonly Page[] = [
  { path: "overview", title: "Overview", group: "Fleet", key: "o", role: "viewer", load: () => import("./pages/Overview.svelte") },
  { path: "models", title: "Models", group: "Fleet", key: "m", role: "viewer", load: () => import("./pages/ModelsPage.svelte") },
  { path: "aliases", title: "Aliases", group: "Fleet", key: "i", role: "viewer", load: () => import("./pages/AliasesPage.svelte") },
  { path: "pools", title: "Pools", group: "Fleet", key: "l", role: "viewer", load: () => import("./pages/PoolsPage.svelte") },
  { path: "nodes", title: "Nodes", group: "Fleet", key: "n", role: "viewer", load: () => import("./pages/NodesPage.svelte") },
  { path: "batches", title: "Batches", group: "Work", key: "b", role: "viewer", load: () => import("./pages/BatchesPage.svelte") },
  { path: "requests", title: "Requests", group: "Work", key: "r", role: "admin", load: () => import("./pages/RequestsPage.svelte") },
  { path: "spot", title: "Spot", group: "Fleet", key: "s", role: "viewer", load: () => import("./pages/SpotPage.svelte") },
  { path: "playground", title: "Playground", group: "Work", key: "y", role: "operator", load: () => import("./pages/PlaygroundPage.svelte") },
  { path: "keys", title: "Keys", group: "Access", key: "k", role: "admin", load: () => import("./pages/KeysPage.svelte") },
  { path: "tenants", title: "Tenants", group: "Access", key: "t", role: "viewer", load: () => import("./pages/TenantsPage.svelte") },
  { path: "audit", title: "Audit", group: "Access", key: "a", role: "viewer", load: () => import("./pages/AuditPage.svelte") },
  { path: "settings", title: "Settings", group: "Access", key: "e", role: "operator", load: () => import("./pages/SettingsPage.svelte") },
  { path: "plans", title: "Plans", group: "Planning", key: "p", role: "viewer", load: () => import("./pages/PlansPage.svelte") },
  { path: "forecasts", title: "Forecasts", group: "Planning", key: "f", role: "viewer", load: () => import("./pages/ForecastsPage.svelte") },
  { path: "what-if", title: "What if", group: "Planning", key: "w", role: "viewer", load: () => import("./pages/WhatIfPage.svelte") },
];
