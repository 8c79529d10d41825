// The server's API: the state it shows, and an answer as it comes.

const STORE = "colibri-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORE) || "",
  set: (value) => sessionStorage.setItem(STORE, value),
};

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = response.statusText;
  try { message = (await response.json()).error.message; } catch { /* the status must do */ }
  throw new Refused(response.status, message);
}

export async function state() {
  return (await ask("debug/state")).json();
}

// Calls on(delta, finishReason) for every chunk; throws when the stream breaks off.
export async function chat(body, signal, on) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let usage = null;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection broke off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return usage;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Refused(500, data.error.message);
      usage = data.usage || usage;
      for (const choice of data.choices) on(choice.delta, choice.finish_reason);
    }
  }
}
