// What the node that answers is doing: transfers, copies, repair; and what it had predicted of those that ended.

import { get } from "./api.js";
import { el, strip, table } from "./dom.js";
import { follow } from "./follow.js";
import { bytes, rate, seconds } from "./format.js";

/** Time between two looks, ms. */
const REFRESH_MS = 2000;

const named = (of) => of.checkpoint ?? el("span", { class: "quiet" }, "of another namespace");
const WAYS = { write: "dump", read: "restore" };

/** How far something is, as a bar and in words. */
function progress(done, all) {
  const words = `${bytes(done)} of ${bytes(all)}`;
  return [strip([["stored", done], ["zero", Math.max(0, all - done)]], words, "bar"), words];
}

/** Average rate since the beginning, and the time left at this rate. */
function pace(done, all, age) {
  if (done === 0 || age <= 0) return el("span", { class: "quiet" }, "nothing moved yet");
  const left = all > done ? `, ${seconds((all - done) / (done / age))} left` : "";
  return `${rate(done / age)}${left}`;
}

const TRANSFERS = [
  { title: "What", cell: (of) => (of.idle ? `${WAYS[of.direction]}, stands still` : WAYS[of.direction]) },
  { title: "Moved", cell: (of) => progress(of.moved_bytes, of.expected_bytes) },
  { title: "Rate", number: true, cell: (of) => pace(of.moved_bytes, of.expected_bytes, of.age_s) },
  { title: "Runs for", number: true, cell: (of) => seconds(of.age_s) },
];

const COPIES = [
  { title: "Checkpoint", cell: named },
  { title: "From", cell: (of) => of.from },
  { title: "Done", cell: (of) => progress(of.done_bytes, of.memory_bytes) },
  { title: "Rate", number: true, cell: (of) => pace(of.done_bytes, of.memory_bytes, of.age_s) },
  { title: "Over the network", number: true, cell: (of) => bytes(of.moved_bytes) },
  { title: "Why", cell: (of) => (of.background ? "repair" : "asked for") },
];

const STEPS = [
  { title: "Checkpoint", cell: named },
  { title: "On", cell: (of) => of.node },
  { title: "Step", cell: (of) => (of.is_copy ? "make a copy" : "drop a copy") },
  { title: "State", cell: (of) => (of.is_running ? "runs" : "waits") },
  { title: "Memory", number: true, cell: (of) => bytes(of.memory_bytes) },
];

const percent = (share) => `${Math.round(share * 100)} %`;

const ENDED = [
  { title: "Checkpoint", cell: (of) => of.checkpoint ?? "" },
  { title: "What", cell: (of) => WAYS[of.direction] },
  { title: "Moved", number: true, cell: (of) => bytes(of.bytes) },
  { title: "Predicted", number: true, cell: (of) => (of.predicted_s === undefined ? "nothing to go by" : seconds(of.predicted_s)) },
  { title: "Measured", number: true, cell: (of) => seconds(of.measured_s) },
  { title: "Off by", number: true, cell: (of) => (of.predicted_s === undefined ? "" : percent((of.predicted_s - of.measured_s) / of.measured_s)) },
  { title: "Ended", number: true, cell: (of) => `${seconds(of.age_s)} ago` },
];

function error(what, of) {
  if (of === undefined) return `No ${what} was predicted yet.`;
  const bias = of.bias >= 0 ? "too much" : "too little";
  return `Predictions of ${what}s were off by ${percent(of.p50)} in the median and ${percent(of.p95)} for 95 of 100 (${of.samples} of them), ${bias} was predicted as a rule.`;
}

function repair(of) {
  if (of === undefined) return [el("p", {}, "Another node leads repair, or there is no cluster: its page shows the steps.")];
  const state = of.under_replicated === 0 ? el("p", { class: "good" }, "Every checkpoint has its copies.")
    : el("p", { class: "bad" }, `${of.under_replicated} checkpoints have too few good copies, ${of.stranded} of them none on a live node.`);
  const counts = `${of.copies_made} copies of ${bytes(of.copied_bytes)} made since the start, ${of.copies_failed} failed; ${of.damaged} copies are damaged. ${of.waiting} steps wait.`;
  return [state, el("p", {}, counts), of.steps.length === 0 ? undefined : table("Steps that run, and the next that wait.", STEPS, of.steps)];
}

const listed = (caption, none, columns, rows) => (rows.length === 0 ? el("p", { class: "quiet" }, none) : table(caption, columns, rows));

/** `#/activity` */
export async function activity(context) {
  const place = el("div");
  context.main.append(el("h1", {}, "Activity"), place);
  const look = async () => {
    const answer = await get("/v1/activity", {}, context.signal);
    place.replaceChildren(
      el("p", { class: "quiet" }, `Of the node ${answer.answered_by}; each node’s own page tells of it.`),
      el("h2", {}, "Dumps and restores"),
      listed("Those that run, the oldest first.", "None runs.", TRANSFERS, answer.transfers),
      el("h2", {}, "Copies from other nodes"),
      listed("Those that come, the oldest first.", "None comes.", COPIES, answer.copies),
      el("h2", {}, "Repair of the cluster"),
      ...repair(answer.repair).filter(Boolean),
      el("h2", {}, "Predicted and measured"),
      el("p", {}, error("dump", answer.dump_time_error), " ", error("restore", answer.restore_time_error)),
      listed("The last that ended here, the newest first.", "None has ended since the node started.", ENDED, answer.ended));
  };
  follow(context, look, (event) => ["checkpoint", "removed", "node", "queue"].includes(event.event));
  await look();
  const timer = setInterval(() => document.hidden || context.refresh(), REFRESH_MS);
  context.signal.addEventListener("abort", () => clearInterval(timer));
}
