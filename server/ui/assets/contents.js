// What a checkpoint consists of: address spaces, shared memory, small images.

import { get } from "./api.js";
import { el, svg, table } from "./dom.js";
import { bytes } from "./format.js";

/** Mappings, shared memories and images that are asked for at a time. */
const PAGE = 300;
const PAGE_BYTES = 4096;

const size = (pages) => (pages === 0 ? "" : bytes(pages * PAGE_BYTES));

/** Pages by kind: each page is of one. */
function kinds(of) {
  const stored = of.stored_pages;
  return [["stored", stored], ["shared", Math.max(0, of.pages - of.zero_pages - stored)], ["zero", of.zero_pages]];
}

const KIND_WORDS = { stored: "stored", shared: "shared with the parent", zero: "zero" };

function words(of) {
  const parts = kinds(of).filter(([, pages]) => pages > 0).map(([kind, pages]) => `${size(pages)} ${KIND_WORDS[kind]}`);
  return parts.length === 0 ? "no pages in the checkpoint" : parts.join(", ");
}

const length = (mapping) => Number(BigInt(`0x${mapping.end}`) - BigInt(`0x${mapping.start}`));

function what(mapping) {
  if (mapping.kind === "file") return mapping.path ?? "file";
  const name = mapping.shared_memory === undefined ? mapping.kind : `${mapping.kind} ${mapping.shared_memory}`;
  return mapping.path === undefined ? `[${name}]` : `[${name}] ${mapping.path}`;
}

const range = (mapping) => `${mapping.start.padStart(12, "0")}-${mapping.end.padStart(12, "0")}`;

const COUNTS = [
  { title: "In the checkpoint", number: true, cell: (of) => size(of.pages.pages) },
  { title: "Stored", number: true, cell: (of) => size(of.pages.stored_pages) },
  { title: "Shared", number: true, cell: (of) => size(kinds(of.pages)[1][1]) },
  { title: "Zero", number: true, cell: (of) => size(of.pages.zero_pages) },
];

const MAPPINGS = [
  { title: "Addresses", cell: (of) => el("code", {}, range(of)) },
  { title: "Rights", cell: (of) => el("code", {}, of.permissions) },
  { title: "Size", number: true, cell: (of) => bytes(length(of)) },
  ...COUNTS,
  { title: "What", cell: what },
];

/** Draws an address space: a column for each mapping, as wide as its pages, of what is stored, shared and zero. */
function space(of) {
  const drawn = of.mappings.length === 0 ? [{ pages: of.pages }] : of.mappings.filter((mapping) => mapping.pages.pages > 0);
  const all = drawn.reduce((sum, mapping) => sum + mapping.pages.pages, 0) || 1;
  let at = 0;
  const columns = drawn.map((mapping) => {
    const column = { mapping, x: (at / all) * 1000, width: (mapping.pages.pages / all) * 1000 };
    at += mapping.pages.pages;
    return column;
  });
  const rects = columns.map(({ mapping, x, width }) => {
    let y = 100;
    return kinds(mapping.pages).filter(([, pages]) => pages > 0).map(([kind, pages]) => {
      const height = (pages / mapping.pages.pages) * 100;
      y -= height;
      return svg("rect", { class: kind, x, width, y, height });
    });
  });
  const mark = svg("rect", { class: "mark", x: 0, width: 0, y: 0, height: 100 });
  const hint = of.mappings.length === 0
    ? "A pre-dump has no images of mappings."
    : "A column is a mapping, as wide as its pages. Point at one to read of it, or open the table.";
  const line = el("p", { class: "under quiet" }, hint);
  const leave = () => {
    mark.setAttribute("width", 0);
    line.textContent = hint;
  };
  const point = (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 1000;
    const column = columns.find((one) => x < one.x + one.width) ?? columns.at(-1);
    if (column?.mapping.start === undefined) return;
    mark.setAttribute("x", column.x);
    mark.setAttribute("width", column.width);
    line.textContent = `${range(column.mapping)} ${column.mapping.permissions} ${what(column.mapping)}: ${words(column.mapping.pages)}`;
  };
  const drawing = svg("svg", {
    class: "strip space", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img",
    "aria-label": `Process ${of.pid}: ${words(of.pages)}; the table below names its mappings`,
    onpointermove: point, onpointerleave: leave,
  }, rects, mark);
  return [drawing, line];
}

/** Makes a table that is there once it is opened: a checkpoint may have thousands of rows. */
function folded(title, make) {
  const details = el("details", {
    ontoggle: () => {
      if (details.open && details.children.length === 1) details.append(make());
    },
  }, el("summary", {}, title));
  return details;
}

const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

function one(of) {
  const names = [of.program, of.executable].filter((name) => name !== "").join(", ");
  const part = of.mappings.length < of.mapping_count ? `${of.mappings.length} of its ` : "";
  const caption = `Mappings of process ${of.pid}, by address.`;
  return el("section", { class: "process" },
    el("h3", {}, `Process ${of.pid}${names === "" ? "" : `: ${names}`}`),
    el("p", {}, `${words(of.pages)}. ${counted(of.threads, "thread")}, ${counted(of.open_files, "open file")}.`),
    space(of),
    of.mapping_count === 0 ? undefined : folded(`${part}${of.mapping_count} mappings`, () => table(caption, MAPPINGS, of.mappings)));
}

const more = (shown, count) => (count > shown ? `, the first ${shown} of ${count}` : "");

function drawn(answer, base, after) {
  const compared = answer.compared_with !== undefined
    ? `Compared with ${answer.compared_with} by checksums.`
    : answer.parent_generation === undefined
      ? "Dumped without a parent: nothing is shared."
      : "The generation that it was dumped against is no longer there: what they share is not known.";
  const shared = [{ title: "Shared memory", cell: (of) => el("code", {}, of.id) }, ...COUNTS];
  const images = [{ title: "Image", cell: (of) => of.name }, { title: "Size", number: true, cell: (of) => bytes(of.size_bytes) }];
  return [
    el("p", { class: "quiet" }, compared),
    answer.processes.map(one),
    el("p", { class: "more" },
      after === undefined ? undefined : el("a", { href: base }, "First mappings"), " ",
      answer.next === undefined ? undefined : el("a", { href: `${base}/${encodeURIComponent(answer.next)}` }, "Next mappings")),
    answer.shared_memory.length === 0 ? undefined
      : table(`Shared memory, which mappings refer to${more(answer.shared_memory.length, answer.shared_memory_count)}.`, shared, answer.shared_memory),
    answer.images.length === 0 ? undefined
      : folded(`${answer.image_count} small images, ${bytes(answer.images.reduce((sum, of) => sum + of.size_bytes, 0))}`,
        () => table(`Small images, the longest first${more(answer.images.length, answer.image_count)}.`, images, answer.images)),
  ];
}

/** Fills `place` with the contents of a checkpoint, from `after` on; a failure is shown there, and may be tried again. */
export async function contents(context, place, checkpoint, base, after) {
  const heading = el("h2", {}, "Address spaces");
  place.replaceChildren(heading, el("p", { class: "quiet" }, "The images are being read."));
  try {
    const answer = await get("/v1/contents", { checkpoint, after, limit: PAGE }, context.signal);
    place.replaceChildren(heading, ...drawn(answer, base, after).flat().filter((child) => child !== undefined));
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error.status === 401) context.stale(error);
    const again = el("button", { type: "button", onclick: () => contents(context, place, checkpoint, base, after) }, "Try again");
    place.replaceChildren(heading, el("p", { class: "box", role: "alert" }, error.message), again);
  }
}
