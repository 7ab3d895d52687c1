// OpenAI's client for Node: answers, errors, a batch. Prints what it saw as JSON.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.TIDEPOOL_TEST_MODULES}/package.json`);
const OpenAI = require("openai");

const { TIDEPOOL_TEST_URL: url, TIDEPOOL_TEST_KEY: apiKey, TIDEPOOL_TEST_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
const ask = {
  model, messages: [{ role: "user", content: "what does the tide bring" }],
  max_tokens: 8, temperature: 0, stop: null, tools: [], n: 1,
};

const whole = await client.chat.completions.create(ask);
let streamed = "", counted = null;
const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  counted = chunk.usage?.completion_tokens ?? counted;
}

async function errorOf(asked, as = client) {
  try {
    await as.chat.completions.create(asked);
  } catch (error) {
    return [error.constructor.name, error.message];
  }
  return null;
}

const errors = {
  unsupported: await errorOf({ ...ask, verbosity: "high" }),
  key: await errorOf(ask, new OpenAI({ baseURL: `${url}/v1`, apiKey: "tp-client-wrong" })),
  model: await errorOf({ ...ask, model: "nobody" }),
  context: await errorOf({ ...ask, max_tokens: 1000000 }),
};

const line = (n) => JSON.stringify({ custom_id: `c${n}`, method: "POST", url: "/v1/chat/completions", body: ask });
const file = await OpenAI.toFile(Buffer.from([0, 1, 2].map(line).join("\n")), "lines.jsonl");
const uploaded = await client.files.create({ file, purpose: "batch" });
let batch = await client.batches.create({
  input_file_id: uploaded.id, endpoint: "/v1/chat/completions", completion_window: "24h",
});
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((done) => setTimeout(done, 200));
  batch = await client.batches.retrieve(batch.id);
}
const answers = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);

console.log(JSON.stringify({
  whole: whole.choices[0].message.content, streamed, usage: [whole.usage.completion_tokens, counted], errors,
  batch: [batch.status, answers.map((answer) => answer.custom_id).sort()],
  context: (await client.models.retrieve(model)).max_model_len,
}));
