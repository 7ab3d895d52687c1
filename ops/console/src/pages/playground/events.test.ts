import { describe, expect, it } from "vitest";

import { eventsOf } from "./events";

async function read(...pieces: string[]): Promise<string[]> {
  const encoder = new TextEncoder();
  const body = new ReadableStream<Uint8Array>({
    start(stream) {
      for (const piece of pieces) stream.enqueue(encoder.encode(piece));
      stream.close();
    },
  });
  const found: string[] = [];
  for await (const event of eventsOf(body)) found.push(event);
  return found;
}

describe("server-sent events", () => {
  it("may come in pieces cut anywhere", async () => {
    expect(await read('data: {"a"', ":1}\n", "\nda", "ta: [DONE]\n\n")).toEqual(['{"a":1}', "[DONE]"]);
  });
  it("may come together, with other lines between", async () => {
    expect(await read("event: x\ndata: 1\n\n: alive\n\ndata: 2\ndata: 3\n\n")).toEqual(["1", "2\n3"]);
  });
  it("are nothing until they end", async () => {
    expect(await read("data: half")).toEqual([]);
  });
});
