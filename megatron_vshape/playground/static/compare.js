// Comparison of schedules on one time axis.

import { Refusal } from "./api.js";
import { ask, timelineRequest } from "./asking.js";
import { byId, refill } from "./dom.js";
import { entryTitle } from "./entries.js";
import { factsTable } from "./numbers.js";
import { app } from "./page.js";
import { captioned, highestOf, setPictures, shared } from "./pictures.js";
import { drawShare } from "./share.js";

/** Show up to six schedules on one time axis; return the errors of those without a timeline. */
export async function showCompared(signal) {
  const { entries, active } = app.state;
  const found = [];
  const failed = [];
  for (const [at, entry] of entries.entries()) {
    try {
      const { timelines } = await ask(timelineRequest(entry), signal);
      found.push(timelines[0]);
    } catch (error) {
      if (!(error instanceof Refusal) || entries.length === 1) throw error;
      const text = `${entryTitle(entry)}: ${error.message}`;
      if (at === active) failed.unshift(new Refusal(error.field, text));
      else failed.push(new Refusal("request", text)); // the form has no such field
    }
  }
  if (signal.aborted) return null;
  if (!found.length) throw failed[0];
  const units = shared.unitsOf(found[0]);
  refill(byId("lead"), factsTable(found, units, app.state.gibPerChunk));
  byId("numbers").replaceChildren();
  const high = Math.max(96, 280 / found.length); // two schedules fit into a window of 900 pixels
  const layout = { withHeld: found.length < 4, high, heldHigh: high * 0.7, heldMost: highestOf(found) };
  setPictures(found.map(captioned), layout);
  drawShare(null, null);
  return failed[0];
}
