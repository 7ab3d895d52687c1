// Headless Chromium at /docs: what it asked for, what it drew, and what went wrong. Prints that as JSON.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.TIDEPOOL_TEST_MODULES}/package.json`);
const { default: chromium } = await import(require.resolve("@sparticuz/chromium"));
const { default: puppeteer } = await import(require.resolve("puppeteer-core"));

const executablePath = await chromium.executablePath();
const browser = await puppeteer.launch({ args: chromium.args, executablePath, headless: chromium.headless });
const page = await browser.newPage();
const asked = [], errors = [];
page.on("request", (request) => asked.push(request.url()));
page.on("pageerror", (error) => errors.push(String(error)));
page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
await page.goto(`${process.env.TIDEPOOL_TEST_URL}/docs`, { waitUntil: "networkidle0", timeout: 120000 });
const drawn = await page.$$eval(".opblock-summary-path", (shown) => shown.map((each) => each.dataset.path));
console.log(JSON.stringify({ asked, errors, drawn }));
await browser.close();
