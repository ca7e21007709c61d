// Talking to the server: the API key, requests, and streams of events.

const KEY = "quire-api-key";

export const keys = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
};

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// A reply of status 2xx; anything else is thrown with the server's own words.
export async function request(path, options = {}) {
  const key = keys.get();
  const headers = { "Content-Type": "application/json" };
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.ok) return reply;
  let message = `the server answered with status ${reply.status}`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // a proxy's page, not the server's words
  }
  throw new ServerError(reply.status, message);
}

// Data of each event of a stream, parsed, until its end.
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.code, event.error.message);
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
