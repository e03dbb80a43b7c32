// What preempting tasks would cost, by each mechanism, and which of them a policy would take.

import { get, post } from "./api.js";
import { el, table } from "./dom.js";
import { bytes, seconds, spread } from "./format.js";

const GIB = 2 ** 30;
/** Tasks that the form takes: for more there is the API. */
const MOST = 20;

const words = (mechanism) => mechanism.replaceAll("_", " ");

// `[name, label, type, how the value becomes a field of a task]`
const FIELDS = [
  ["job", "Job", "text", (task, value) => { task.job = value; }],
  ["node", "Node", "text", (task, value) => { task.node = value; }],
  ["memory", "Memory, GiB", "number", (task, value) => {
    task.resident_bytes = Math.round(value * GIB);
    task.holds = { ...task.holds, memory_bytes: task.resident_bytes };
  }],
  ["processors", "Processors", "number", (task, value) => { task.holds = { ...task.holds, cpu_millis: Math.round(value * 1000) }; }],
  ["progress", "Has worked, minutes", "number", (task, value) => { task.progress_s = value * 60; }],
  ["remaining", "Still works, minutes", "number", (task, value) => { task.remaining_s = value * 60; }],
];

function fields(number) {
  const inputs = FIELDS.map(([name, label, type]) => {
    const id = `task-${number}-${name}`;
    const kind = type === "number" ? { type, min: 0, step: "any", size: 8 } : { type, list: `${name}s`, size: 18 };
    return el("div", {}, el("label", { for: id }, label), el("input", { id, name, ...kind }));
  });
  return el("fieldset", {}, el("legend", {}, `Task ${number}`), inputs);
}

function read(set, n) {
  const task = { id: `task ${n + 1}` };
  for (const [name, , type, put] of FIELDS) {
    const value = set.querySelector(`[name=${name}]`).value.trim();
    if (value !== "") put(task, type === "number" ? Number(value) : value);
  }
  return task;
}

const COSTS = [
  { title: "Way", cell: (of) => [words(of.mechanism), of.best ? el("strong", {}, " – least loss") : ""] },
  { title: "Task loses", number: true, cell: (of) => (of.cost ? spread(of.cost.overhead_s) : "unknown") },
  { title: "Others wait", number: true, cell: (of) => (of.cost ? spread(of.cost.delay_s) : "") },
  { title: "Until it runs again", number: true, cell: (of) => (of.cost ? spread(of.cost.until_running_s) : "") },
  {
    title: "Why",
    cell: (of) => {
      if (!of.cost) return of.unknown;
      const parts = (of.cost.parts ?? []).map((part) => `${words(part.part)} ${seconds(part.p50_s)}`);
      return [of.cost.reason, el("div", { class: "quiet" }, parts.join(", "))];
    },
  },
];

function estimates(answer, tasks) {
  return tasks.map((task) => {
    const rows = answer.answers.filter((of) => of.task === task.id);
    // Waiting loses nothing, and frees nothing until the end.
    const known = rows.filter((of) => of.cost && of.mechanism !== "wait");
    const least = Math.min(...known.map((of) => of.cost.overhead_s.p50));
    const best = known.find((of) => of.cost.overhead_s.p50 === least);
    if (best) best.best = true;
    const caption = `${task.id}${task.job ? `, ${task.job}` : ""}: medians, in brackets what 95 of 100 do not exceed`;
    return table(caption, COSTS, rows);
  });
}

const VICTIMS = [
  { title: "Task", cell: (of) => of.task },
  { title: "How", cell: (of) => words(of.mechanism) },
  { title: "Node", cell: (of) => of.node },
  { title: "Frees", cell: (of) => `${bytes(of.frees.memory_bytes)}, ${of.frees.cpu_millis / 1000} processors` },
  { title: "Loses", number: true, cell: (of) => spread(of.cost.overhead_s) },
  { title: "Why", cell: (of) => of.reason ?? "" },
];

function plan(answer) {
  const missing = [
    ...answer.undecided.map((of) => `${of.task}: ${of.reason}`),
    ...answer.unknown_node.map((of) => `${of.task}: ${of.node === undefined ? "name its node" : `there is no node ${of.node}`}`),
  ];
  const caption = answer.enough
    ? "These free what is wanted, in this order."
    : `Not enough: ${bytes(answer.lacking.memory_bytes)} and ${answer.lacking.cpu_millis / 1000} processors are lacking.`;
  return [table(caption, VICTIMS, answer.victims), missing.map((line) => el("p", { class: "bad" }, line))];
}

/** `#/what-if` */
export async function whatIf(context) {
  const limit = 1000;
  const [jobs, nodes] = await Promise.all([get("/v1/jobs", { limit }, context.signal), get("/v1/nodes", { limit }, context.signal)]);
  const options = (id, names) => el("datalist", { id }, names.map((value) => el("option", { value })));
  const sets = el("div", {}, fields(1));
  const result = el("div", { role: "region", "aria-label": "Result", "aria-live": "polite" });
  const add = el("button", {
    type: "button",
    onclick: () => {
      sets.append(fields(sets.children.length + 1));
      add.hidden = sets.children.length >= MOST;
      sets.lastChild.querySelector("input").focus();
    },
  }, "Add a task");
  const wanted = (id, label) => el("div", {}, el("label", { for: id }, label), el("input", { id, type: "number", min: 0, step: "any", size: 8 }));
  const submit = async (event) => {
    event.preventDefault();
    const tasks = [...sets.children].map(read);
    const want = (id) => Number(form.querySelector(`#${id}`).value || 0);
    const resources = { memory_bytes: Math.round(want("want-memory") * GIB), cpu_millis: Math.round(want("want-processors") * 1000) };
    try {
      const parts = [el("h2", {}, "What each way costs"), estimates(await post("/v1/estimate", { tasks }, context.signal), tasks)];
      if (resources.memory_bytes > 0 || resources.cpu_millis > 0) {
        const answer = await post("/v1/preempt", { candidates: tasks, wanted: resources }, context.signal);
        parts.push(el("h2", {}, "What would be taken"), plan(answer));
      }
      result.replaceChildren(...parts.flat(3));
    } catch (error) {
      if (error.status === 401) context.stale(error);
      if (error.name !== "AbortError") result.replaceChildren(el("p", { class: "box", role: "alert" }, error.message));
    }
  };
  const form = el("form", { onsubmit: submit }, sets,
    el("fieldset", {}, el("legend", {}, "Wanted, to be freed by them (may be left out)"), wanted("want-memory", "Memory, GiB"), wanted("want-processors", "Processors")),
    add, " ", el("button", {}, "What would it cost?"));
  context.main.append(
    el("h1", {}, "What if"),
    el("p", {}, "Tasks that might be preempted, and what waiting for them, killing them or freezing them would cost now. Leave out what you do not know. Nothing is done to them."),
    options("jobs", jobs.jobs.map((of) => of.job)), options("nodes", nodes.nodes.map((of) => of.name)), form, result);
}
