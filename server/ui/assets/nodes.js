// The nodes, a page at a time: state, tiers with room and rates, queues. Events change their queues at once.

import { get } from "./api.js";
import { el, strip, table } from "./dom.js";
import { follow } from "./follow.js";
import { bytes, figure, rate, seconds } from "./format.js";

/** Nodes of a page. */
const PAGE = 100;
/** Time between two looks at the nodes that are shown, ms. */
const REFRESH_MS = 5000;

const state = (node) => {
  if (!node.live) return el("span", { class: "bad" }, "not alive");
  if (node.stopping) return "stopping";
  return node.state === "active" ? el("span", { class: "good" }, "alive") : node.state;
};

const queue = (of) => {
  if (of.running === undefined) return el("span", { class: "quiet" }, "unknown");
  const slots = of.slots === undefined ? "" : ` of ${of.slots}`;
  return el("span", {}, `${of.running}${slots} run, ${of.waiting} wait`, of.waiting > 0 ? [", ", figure(of.time_s, seconds)] : []);
};

const perTier = (node, say) => node.tiers.map((tier) => el("div", {}, say(tier)));

const COLUMNS = [
  { title: "Node", cell: (node) => el("span", { title: node.address }, node.name) },
  { title: "State", cell: (node) => [state(node), node.doubts.map((doubt) => el("div", { class: "bad" }, doubt))] },
  { title: "Class", cell: (node) => [node.class, node.zone && `, ${node.zone}`, node.rack && `, ${node.rack}`] },
  { title: "Tier", cell: (node) => perTier(node, (tier) => (tier.emulated ? `${tier.tier} (emulates ${tier.emulated})` : tier.tier)) },
  {
    title: "In use",
    cell: (node) => perTier(node, (tier) => {
      const used = tier.capacity_bytes - tier.free_bytes;
      const words = `${bytes(used)} of ${bytes(tier.capacity_bytes)}`;
      return [strip([["stored", used], ["zero", tier.free_bytes]], words, "bar"), words];
    }),
  },
  { title: "Dumps", number: true, cell: (node) => perTier(node, (tier) => figure(tier.write_bytes_per_s, rate)) },
  { title: "Restores", number: true, cell: (node) => perTier(node, (tier) => figure(tier.read_bytes_per_s, rate)) },
  // Both queues are the node's, not a tier's.
  { title: "Queue of dumps", cell: (node) => el("span", { "data-queue": `${node.name} dump` }, node.tiers[0] ? queue(node.tiers[0].write_queue) : "") },
  { title: "Queue of restores", cell: (node) => el("span", { "data-queue": `${node.name} restore` }, node.tiers[0] ? queue(node.tiers[0].read_queue) : "") },
  { title: "Reported", number: true, cell: (node) => (node.age_s === undefined ? "never" : `${seconds(node.age_s)} ago`) },
];

/** `#/nodes/AFTER` */
export async function nodes(context, after) {
  const place = el("div");
  context.main.append(el("h1", {}, "Nodes"), place);
  const look = async () => {
    const answer = await get("/v1/nodes", { limit: PAGE, after }, context.signal);
    const live = answer.nodes.filter((node) => node.live).length;
    const caption = `${live} of ${answer.nodes.length} nodes here are alive. ${answer.answered_by} answers.`;
    const links = [
      after === undefined ? undefined : el("a", { href: "#/nodes" }, "First nodes"),
      " ",
      answer.next === undefined ? undefined : el("a", { href: `#/nodes/${encodeURIComponent(answer.next)}` }, "Next nodes"),
    ];
    place.replaceChildren(table(caption, COLUMNS, answer.nodes), el("p", { class: "more" }, links));
  };
  follow(context, look, (event) => event.event === "node");
  const nodeChanged = context.event;
  context.event = (event) => {
    nodeChanged(event);
    if (event.event !== "queue") return;
    const cell = place.querySelector(`[data-queue="${CSS.escape(`${event.node} ${event.direction}`)}"]`);
    cell?.replaceChildren(`${event.running} run, ${event.waiting} wait, ${bytes(event.bytes)} to move`);
  };
  await look();
  const timer = setInterval(() => document.hidden || context.refresh(), REFRESH_MS);
  context.signal.addEventListener("abort", () => clearInterval(timer));
}
