// Requests to the API of the node that this page came from.

const KEY = "permafrost-token";

/** Silence after which a stream of events counts as broken, ms: the node sends a comment every 15 s. */
const SILENCE_MS = 45_000;

/** A request that was refused: the problem (RFC 9457) that the node answered with. */
export class Refused extends Error {
  constructor(status, title, detail) {
    super(detail || title);
    this.status = status;
    this.title = title;
  }
}

// Of this tab, and gone with it.
export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const held = token.get();
  if (held) headers.authorization = `Bearer ${held}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The node does not answer", "The node does not answer: it may be stopped. Other nodes serve this page, too.");
  }
  if (response.ok) return response;
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // Not ours: a proxy's.
  }
  const fields = (problem.errors ?? []).map((error) => `${error.pointer}: ${error.detail}`);
  throw new Refused(response.status, problem.title ?? response.statusText, [problem.detail, ...fields].filter(Boolean).join(". "));
}

/** Asks with GET; parameters that are undefined are left out. */
export async function get(path, parameters = {}, signal = undefined) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined);
  const query = new URLSearchParams(given).toString();
  return (await ask(query ? `${path}?${query}` : path, { signal })).json();
}

export async function post(path, body, signal = undefined) {
  const headers = { "content-type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

/** Reads the stream of events until it ends: an EventSource could not send a token. */
export async function events(each, opened, signal) {
  const response = await ask("/v1/events", { signal });
  opened();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const silence = setTimeout(() => reader.cancel(), SILENCE_MS);
    const { value, done } = await reader.read().finally(() => clearTimeout(silence));
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      if (data) each(JSON.parse(data));
    }
  }
}
