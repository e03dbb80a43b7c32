// Quantities in words. Sizes are in units of 1,024, as the command line prints them.

import { el } from "./dom.js";

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count : count.toFixed(count < 10 ? 2 : count < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

// Times below the first number of seconds: their larger and smaller unit, seconds each, and the names of both.
const LONG = [
  [3600, 60, 1, "min", "s"],
  [86400, 3600, 60, "h", "min"],
  [Infinity, 86400, 3600, "d", "h"],
];

export function seconds(s) {
  if (s < 0.001) return s === 0 ? "0 s" : "< 1 ms";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  for (const [below, large, small, whole, part] of LONG) {
    if (s >= below) continue;
    const parts = Math.round(s / small);
    const rest = parts % (large / small);
    return `${Math.floor(parts / (large / small))} ${whole}${rest > 0 ? ` ${rest} ${part}` : ""}`;
  }
}

/** A figure of the API, `{p50, p95, age_s, samples}` or `{unknown}`: its median, and the rest as its title. */
export function figure(of, say) {
  if (of === undefined || of.unknown !== undefined) {
    return el("span", { class: "quiet", title: of?.unknown ?? "" }, "unknown");
  }
  const from = of.samples === 0 ? "given, not measured" : `${of.samples} samples, the last ${seconds(of.age_s)} ago`;
  return el("span", { title: `95 of 100 are no worse than ${say(of.p95)}; ${from}` }, say(of.p50));
}

export const rate = (bytes_per_s) => `${bytes(bytes_per_s)}/s`;
export const time = (unix_ms) => new Date(unix_ms).toLocaleString();

/** A spread of the API, `{p50, p95}`. */
export const spread = (of) => `${seconds(of.p50)} (${seconds(of.p95)})`;
