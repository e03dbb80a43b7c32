// Jobs, their generations over time, and the state of one checkpoint.

import { get } from "./api.js";
import { contents } from "./contents.js";
import { el, strip, svg, table, terms } from "./dom.js";
import { follow } from "./follow.js";
import { bytes, figure, seconds, time } from "./format.js";

/** Jobs or checkpoints of a page. */
const PAGE = 100;

const jobLink = (name) => el("a", { href: `#/job/${encodeURIComponent(name)}` }, name);
const link = (of) => el("a", { href: `#/checkpoint/${encodeURIComponent(of.job)}/${of.generation}` }, of.checkpoint);

/** Bytes of a checkpoint that it added, that it shares with earlier ones, and that are zero. */
function parts(of) {
  const stored = Math.min(of.stored_bytes, of.memory_bytes - of.zero_bytes);
  return { stored, shared: Math.max(0, of.memory_bytes - of.zero_bytes - stored), zero: of.zero_bytes };
}

function copies(of) {
  const states = of.holders.map((holder) => [holder, health(of, holder)]);
  const good = states.filter(([, state]) => state.good).length;
  const names = states.map(([holder, state]) => (state.good ? holder : `${holder} (${state.words})`));
  const words = `${good} of ${of.copies_wanted}: ${names.join(", ")}`;
  const few = good < of.copies_wanted;
  return [
    el("span", { class: few ? "bad" : undefined }, few ? `${words} (too few)` : words),
    of.damaged === undefined ? undefined : el("div", { class: "bad" }, `damaged: ${of.damaged}`),
  ];
}

const ofCheckpoints = (concerns) => (event) =>
  (event.event === "checkpoint" || event.event === "removed") && concerns(event);

/** Lists checkpoints of a job; none if there is no such job, or no longer. */
async function list(context, parameters) {
  try {
    return await get("/v1/checkpoints", parameters, context.signal);
  } catch (error) {
    if (error.status === 404) return { checkpoints: [] };
    throw error;
  }
}

/** `#/jobs/AFTER` */
export async function jobs(context, after) {
  const place = el("div");
  context.main.append(el("h1", {}, "Jobs"), place);
  const columns = [
    { title: "Job", cell: (of) => jobLink(of.job) },
    { title: "Checkpoints", number: true, cell: (of) => String(of.checkpoints) },
    { title: "Last", cell: (of) => (of.last ? link(of.last) : "pre-dumps only") },
    { title: "Age", number: true, cell: (of) => (of.last ? seconds(of.last.age_s) : "") },
    { title: "Memory", number: true, cell: (of) => (of.last ? bytes(of.last.memory_bytes) : "") },
    { title: "Added", number: true, cell: (of) => (of.last ? bytes(of.last.stored_bytes) : "") },
    { title: "Next full dump", number: true, cell: (of) => figure(of.next_full_bytes, bytes) },
    { title: "Next delta", number: true, cell: (of) => figure(of.next_incremental_bytes, bytes) },
    { title: "Copies", cell: (of) => (of.last ? copies(of.last) : "") },
  ];
  const look = async () => {
    const answer = await get("/v1/jobs", { limit: PAGE, after }, context.signal);
    const none = answer.jobs.length === 0 && after === undefined;
    const links = [
      after === undefined ? undefined : el("a", { href: "#/jobs" }, "First jobs"),
      " ",
      answer.next === undefined ? undefined : el("a", { href: `#/jobs/${encodeURIComponent(answer.next)}` }, "Next jobs"),
    ];
    place.replaceChildren(
      none
        ? el("p", {}, "There is no checkpoint that you may see. ", el("code", {}, "permafrost dump --pid PID --job NAME"), " makes one.")
        : table(`Jobs with checkpoints, by name, at most ${PAGE} here.`, columns, answer.jobs),
      el("p", { class: "more" }, links));
  };
  follow(context, look, ofCheckpoints(() => true));
  await look();
}

/** Draws generations from left to right: what each added below, what it shares above. */
function chart(list) {
  const most = Math.max(1, ...list.map((of) => of.memory_bytes));
  const width = 1000 / Math.max(list.length, 20);
  const bars = list.map((of, n) => {
    const { stored, shared } = parts(of);
    const [low, high] = [(stored / most) * 100, (shared / most) * 100];
    const at = { x: n * width, width: width * 0.85 };
    return svg("a", { href: `#/checkpoint/${encodeURIComponent(of.job)}/${of.generation}`, tabindex: -1 },
      svg("title", {}, `${of.checkpoint}: ${bytes(stored)} added, ${bytes(shared)} shared`),
      svg("rect", { class: "shared", ...at, y: 100 - low - high, height: high }),
      svg("rect", { class: "stored", ...at, y: 100 - low, height: low }));
  });
  const words = `Bytes of ${list.length} generations; the table below has the numbers`;
  return svg("svg", { class: "chart", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": words }, bars);
}

const keys = (zero) =>
  el("p", {},
    el("span", { class: "key of-stored" }, "added"),
    el("span", { class: "key of-shared" }, "shared with earlier ones"),
    zero ? el("span", { class: "key of-zero" }, "zero") : undefined);

/** `#/job/NAME/AFTER` */
export async function job(context, name, after) {
  const place = el("div");
  context.main.append(el("h1", {}, name), place);
  const columns = [
    { title: "Generation", cell: link },
    { title: "Sealed", cell: (of) => time(of.created_unix_ms) },
    { title: "Kind", cell: (of) => [of.kind, of.pinned ? ", pinned" : ""] },
    { title: "Memory", number: true, cell: (of) => bytes(of.memory_bytes) },
    { title: "Added", number: true, cell: (of) => bytes(of.stored_bytes) },
    { title: "Shared", number: true, cell: (of) => bytes(parts(of).shared) },
    { title: "Processes", number: true, cell: (of) => String(of.processes) },
    { title: "Copies", cell: copies },
  ];
  const look = async () => {
    const answer = await list(context, { job: name, limit: PAGE, after });
    const listed = answer.checkpoints;
    const base = `#/job/${encodeURIComponent(name)}`;
    const links = [
      after === undefined ? undefined : el("a", { href: base }, "First generations"),
      " ",
      answer.next === undefined ? undefined : el("a", { href: `${base}/${encodeURIComponent(answer.next)}` }, "Next generations"),
    ];
    place.replaceChildren(
      listed.length === 0
        ? el("p", {}, "This job has no checkpoint that you may see.")
        : el("div", {}, chart(listed), keys(false), table("Generations, the oldest first.", columns, listed)),
      el("p", { class: "more" }, links));
  };
  follow(context, look, ofCheckpoints((event) => event.job === name));
  await look();
}

/** `#/checkpoint/JOB/GENERATION/AFTER` */
export async function checkpoint(context, name, generation, after) {
  const number = Number(generation);
  const before = number > 1 ? `${name}@${number - 1}` : undefined;
  const [place, inside] = [el("div"), el("div")];
  context.main.append(el("h1", {}, `${name}@${generation}`), place, inside);
  let isRead = false;
  const look = async () => {
    const answer = await list(context, { job: name, after: before, limit: 1 });
    const of = answer.checkpoints.find((one) => one.generation === number);
    place.replaceChildren(of ? described(name, of) : el("p", {}, "There is no such checkpoint, or you may not see it: ", jobLink(name), "."));
    if (!of) inside.replaceChildren();
    // What a checkpoint consists of does not change. It may take seconds: the rest is shown before.
    if (of && !isRead) contents(context, inside, of.checkpoint, link(of).getAttribute("href"), after);
    isRead = of !== undefined;
  };
  follow(context, look, (event) => event.event === "node" || ofCheckpoints((of) => of.job === name)(event));
  await look();
}

/** Words for a copy, and whether it is one that counts. */
function health(of, holder) {
  const away = of.away_holders?.includes(holder) ?? false;
  const damaged = of.damaged_holders?.includes(holder) ?? false;
  const cold = of.cold_holders?.includes(holder) ?? false;
  const words = [damaged ? "damaged" : undefined, away ? "not alive" : undefined, cold ? "in part in an object store" : undefined];
  return { good: !away && !damaged, words: words.filter(Boolean).join(", ") || "good" };
}

function described(name, of) {
  const { stored, shared, zero } = parts(of);
  const words = `${bytes(stored)} added, ${bytes(shared)} shared with earlier ones, ${bytes(zero)} zero`;
  const columns = [
    { title: "Copy on", cell: (holder) => holder },
    { title: "State", cell: (holder) => el("span", { class: health(of, holder).good ? "good" : "bad" }, health(of, holder).words) },
  ];
  return el("div", {},
    strip([["stored", stored], ["shared", shared], ["zero", zero]], words),
    keys(true),
    terms([
      ["Memory", `${bytes(of.memory_bytes)}: ${words}`],
      ["Sealed", `${time(of.created_unix_ms)}, ${seconds(of.age_s)} ago`],
      ["Kind", of.pinned ? `${of.kind}, pinned` : of.kind],
      ["Compared with", of.parent_generation === undefined ? "none: a dump of everything" : link({ ...of, checkpoint: `${name}@${of.parent_generation}`, generation: of.parent_generation })],
      ["Processes", String(of.processes)],
      ["Work done", of.worked_s === undefined ? "unknown" : seconds(of.worked_s)],
      ["Copies", copies(of)],
      ["Id", el("code", {}, of.id)],
      ["Job", jobLink(name)],
    ]),
    table(`Copies: ${of.copies_wanted} wanted.`, columns, of.holders));
}
