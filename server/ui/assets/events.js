// The newest events, while this view is open.

import { el } from "./dom.js";
import { bytes } from "./format.js";

/** Events that are kept. */
const KEPT = 200;

const SAY = {
  checkpoint: (of) => `${of.checkpoint} was sealed: ${bytes(of.memory_bytes)} of memory, ${bytes(of.stored_bytes)} added`,
  removed: (of) => `${of.checkpoint} was removed`,
  node: (of) => `${of.node} is ${of.live ? "alive" : "not alive"}`,
  queue: (of) => `${of.node}: ${of.running} ${of.direction}s run, ${of.waiting} wait, ${bytes(of.bytes)} to move`,
  missed: (of) => `${of.missed} events were missed: this reader was too slow`,
};

/** `#/events` */
export async function eventList(context) {
  const list = el("ol", { reversed: true });
  context.main.append(el("h1", {}, "Events"), el("p", { class: "quiet" }, `The newest ${KEPT} since you opened this view.`), list);
  context.event = (event) => {
    const text = SAY[event.event]?.(event) ?? JSON.stringify(event);
    list.prepend(el("li", {}, el("span", { class: "quiet" }, new Date().toLocaleTimeString()), " ", text));
    while (list.children.length > KEPT) list.lastChild.remove();
  };
}
