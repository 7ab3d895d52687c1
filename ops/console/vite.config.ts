/// <reference types="vitest/config" />
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The built files are committed and served by `tidepool api` at /ui, under a policy that allows nothing inline.
// `npm run dev` serves the sources instead, and asks the API at TIDEPOOL_URL.
const api = process.env["TIDEPOOL_URL"] ?? "http://127.0.0.1:8080";

export default defineConfig({
  base: "./",
  plugins: [svelte()],
  build: {
    outDir: "../../controlplane/api/console/dist",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 150,
  },
  server: {
    proxy: Object.fromEntries(
      ["/admin", "/v1", "/ui/session", "/ui/sessions", "/ui/oidc"].map((path) => [path, api]),
    ),
  },
  test: { include: ["src/**/*.test.ts"], environment: "node" },
});
