/** The data of server-sent events, as a stream brings them. */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let waiting = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      waiting = (waiting + decoder.decode(value, { stream: true })).replaceAll("\r\n", "\n");
      const events = waiting.split("\n\n");
      waiting = events.pop() ?? "";
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length > 0) yield data.join("\n");
      }
    }
  } finally {
    reader.releaseLock();
  }
}
