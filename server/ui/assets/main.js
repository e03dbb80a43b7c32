// The frame of the page: which view is shown, who asks, and the stream of events.

import { Refused, events, token } from "./api.js";
import { activity } from "./activity.js";
import { el } from "./dom.js";
import { checkpoint, job, jobs } from "./jobs.js";
import { eventList } from "./events.js";
import { nodes } from "./nodes.js";
import { whatIf } from "./what_if.js";

/** Time between two tries to read events, ms. */
const AGAIN_MS = 3000;

const view = document.getElementById("view");
const stream = document.getElementById("stream");
const stale = document.getElementById("stale");
const signOut = document.getElementById("sign-out");

// Each view is `async (context, ...parts)`: it fills `context.main`, and may set `context.event`, which is called
// with each event, and `context.refresh`, which is called when events may have been missed. `context.signal` ends its
// requests when another view is chosen.
const VIEWS = { nodes, jobs, job, checkpoint, activity, "what-if": whatIf, events: eventList };

let shown = { abort: new AbortController() };
let reading;

function route() {
  try {
    const [name, ...parts] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
    if (Object.hasOwn(VIEWS, name)) return [name, parts];
  } catch {
    // A cut-off escape: as good as no address.
  }
  return ["nodes", []];
}

async function show() {
  shown.abort.abort();
  const [name, parts] = route();
  const context = { abort: new AbortController(), main: el("div") };
  context.signal = context.abort.signal;
  context.fresh = () => say(stale, "", context);
  // What was shown stays, older than it should be; the next look may succeed.
  context.stale = (error) => {
    if (error.status === 401) fail(context, error);
    else if (error.name !== "AbortError") say(stale, `not up to date: ${error.message}`, context);
  };
  shown = context;
  for (const link of document.querySelectorAll("nav a")) {
    const of = link.getAttribute("href").slice(2);
    const current = of === name || (of === "jobs" && (name === "job" || name === "checkpoint"));
    current ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  say(stale, "");
  view.replaceChildren(context.main);
  view.setAttribute("aria-busy", "true");
  signOut.hidden = token.get() === null;
  try {
    await VIEWS[name](context, ...parts);
    const title = context.main.querySelector("h1");
    document.title = title ? `${title.textContent} – Permafrost` : "Permafrost";
    if (shown === context) read();
  } catch (error) {
    fail(context, error);
  }
  if (shown === context) view.removeAttribute("aria-busy");
}

/** Writes into a status line, which screen readers announce when it changes. */
function say(line, text, context = shown) {
  if (shown === context && line.textContent !== text) line.textContent = text;
}

function fail(context, error) {
  if (error.name === "AbortError" || shown !== context) return;
  if (error instanceof Refused && error.status === 401) return askForToken(error);
  const again = el("button", { type: "button", onclick: show }, "Try again");
  const title = error instanceof Refused ? error.title : "This page has a fault";
  view.replaceChildren(el("h1", {}, title), el("p", { class: "box", role: "alert" }, error.message), again);
}

function askForToken(error) {
  const held = token.get() !== null;
  // The view behind the question would go on asking.
  shown.abort.abort();
  token.clear();
  reading?.abort();
  signOut.hidden = true;
  const field = el("input", { id: "token", type: "password", autocomplete: "off", required: true, size: 50 });
  const enter = (event) => {
    event.preventDefault();
    token.set(field.value.trim());
    show();
  };
  view.replaceChildren(el("div", {},
    el("h1", {}, "Who asks?"),
    held ? el("p", { class: "box", role: "alert" }, `The node does not take this token: ${error.message}`) : undefined,
    el("p", {}, "The page shows what your token may read. ", el("code", {}, "permafrost token new"), " makes one, and a line for the node’s file of tokens; a certificate of the cluster in this browser serves as well."),
    el("form", { onsubmit: enter }, el("label", { for: "token" }, "Token"), field, " ", el("button", {}, "Show"))));
  document.title = "Who asks? – Permafrost";
  field.focus();
}

/** Reads events as long as the page is to be seen; begins again when they end. */
async function read() {
  if (document.hidden || (reading && !reading.signal.aborted)) return;
  const mine = new AbortController();
  reading = mine;
  const opened = () => {
    say(stream, "live");
    // What has changed since the last look.
    shown.refresh?.();
  };
  while (!mine.signal.aborted) {
    try {
      await events((event) => shown.event?.(event), opened, mine.signal);
    } catch (error) {
      if (error instanceof Refused && error.status === 401) askForToken(error);
    }
    if (mine.signal.aborted) break;
    say(stream, "not live: the stream of events has ended");
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
  if (reading === mine) say(stream, "");
}

// A browser has six connections to a node, of all of its tabs: those that nobody looks at leave theirs to others.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) reading?.abort();
  else if (!shown.signal?.aborted) read();
});
signOut.addEventListener("click", () => {
  token.clear();
  reading?.abort();
  show();
});
window.addEventListener("hashchange", () => {
  show();
  view.focus();
});
show();
