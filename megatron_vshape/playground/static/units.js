// Scales and labels of times and memory.

import { digits } from "./dom.js";

const TIMES = { "": "passes", ms: "ms", us: "µs" };

/** Return the units of a timeline, or else of the user's choice. */
export function unitsFor(facts, unit) {
  const timeScale = facts.in_bytes ? 1e-3 : 1;
  const heldDivisor = facts.in_bytes ? 2 ** 30 : 1;
  return {
    timeScale,
    timeName: facts.in_bytes ? "ms" : TIMES[facts.in_passes ? "" : unit],
    time: (value) => digits(value * timeScale, 5),
    heldDivisor,
    heldName: facts.in_bytes ? "GiB" : "chunks",
    held: (value) => digits(value / heldDivisor, 4),
  };
}
