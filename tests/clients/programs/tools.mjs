// OpenAI's client for Node: tool calls, a parsed answer, embeddings. Prints what it saw as JSON.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.TIDEPOOL_TEST_MODULES}/package.json`);
const OpenAI = require("openai");

const { TIDEPOOL_TEST_URL: url, TIDEPOOL_TEST_KEY: apiKey } = process.env;
const { TIDEPOOL_TEST_MODEL: model, TIDEPOOL_TEST_EMBEDDER: embedder } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, timeout: 300000 });
const parameters = {
  type: "object", additionalProperties: false, required: ["port", "days"],
  properties: { port: { enum: ["brest", "cork"] }, days: { enum: [1, 2] } },
};
const ask = {
  model, messages: [{ role: "user", content: "When is the tide in Brest?" }], max_tokens: 96, temperature: 0,
};
const tools = [{ type: "function", function: { name: "Forecast", parameters, strict: true } }];
const forced = { ...ask, tools, tool_choice: { type: "function", function: { name: "Forecast" } } };

const called = await client.chat.completions.create(forced);
const call = called.choices[0].message.tool_calls[0];
const stream = client.chat.completions.stream(forced);
const streamed = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
const format = { type: "json_schema", json_schema: { name: "forecast", schema: parameters, strict: true } };
const parsed = await client.chat.completions.parse({ ...ask, response_format: format });
const vectors = await client.embeddings.create({ model: embedder, input: ["high water", "low water"] });

console.log(JSON.stringify({
  finish: called.choices[0].finish_reason,
  called: [call.function.name, JSON.parse(call.function.arguments)],
  streamed: [streamed.function.name, JSON.parse(streamed.function.arguments)],
  parsed: JSON.parse(parsed.choices[0].message.content),
  vectors: vectors.data.map((each) => each.embedding.length),
}));
