// State of the page, loaded from the URL and written back.

import { byId, debounced } from "./dom.js";
import { afterPress } from "./press.js";
import { readState, writeState } from "./state.js";
import { View } from "./view.js";

const VIEW_ONLY = new Set(["follow", "window", "range", "theme", "step", "tab", "active"]);
const REDRAWN = new Set(["follow", "range", "theme"]); // require no new schedule

export const app = {
  state: null,
  offers: null,
  embedded: null,
  tracks: [],
  shown: [],
  work: null,
  bounds: "",
  complaint: null, // about the opened files, until the next change
  written: null,
};

export const view = new View(() => {
  app.state.window = view.opened ? null : [view.start, view.end];
  writeUrlSoon();
});
const writeUrlSoon = debounced(() => writeUrl(), 200);

const acts = {};
let urlTurn = 0; // reading and writing the address are asynchronous; only the last one counts
let stepOwed = false; // whether the next address becomes a new history entry

/** Register the reactions to a change: `render`, `redraw`, `dress`, and `open` for files. */
export function connect(given) {
  Object.assign(acts, given);
}

/** Apply a change by the user to the state and the display; Back undoes it. */
export function change(patch, { undoable = true } = {}) {
  app.complaint = null;
  if (patch.files) return acts.open(patch.files);
  const sameMaterial = Object.keys(patch).every((key) => VIEW_ONLY.has(key));
  Object.assign(app.state, patch);
  if (!sameMaterial) Object.assign(app.state, { window: null, follow: null, range: null });
  if ("theme" in patch) acts.dress();
  writeUrl(undoable);
  if (Object.keys(patch).every((key) => REDRAWN.has(key))) acts.redraw();
  else showAgain();
}

/** Display the complete state after the current click or key press has been handled. */
export function showAgain() {
  app.work?.abort();
  app.work = null;
  byId("stage").setAttribute("aria-busy", "true");
  afterPress(acts.render);
}

/** Load the state from the address; return whether it differs from the last written one. */
export async function readUrl() {
  const text = location.hash.slice(1);
  if (text === app.written) return false;
  const mine = ++urlTurn;
  const state = await readState(text);
  if (mine !== urlTurn) return false;
  stepOwed = false;
  app.written = text;
  app.state = state;
  return true;
}

/** Write the state to the address, as a new history entry if Back is to undo it. */
export async function writeUrl(undoable = false) {
  stepOwed ||= undoable;
  const mine = ++urlTurn;
  const { text, whole } = await writeState(app.state);
  if (mine !== urlTurn) return;
  const step = stepOwed && text !== app.written;
  stepOwed = false;
  app.written = text;
  app.linkWhole = whole;
  if (step) history.pushState(null, "", `#${text}`);
  else history.replaceState(null, "", `#${text}`);
}
