// The page's state and what is known besides it: taken from the URL, changed, written back.

import { byId, debounced } from "./dom.js";
import { afterPress } from "./press.js";
import { readState, writeState } from "./state.js";
import { View } from "./view.js";

const VIEW_ONLY = new Set(["follow", "block", "window", "range", "theme", "step", "tab", "active"]);
const REDRAWN = new Set(["follow", "block", "range", "theme"]); // what needs no schedule made

export const app = {
  state: null,
  offers: null,
  embedded: null,
  tracks: [],
  shown: [],
  work: null,
  bounds: "",
  complaint: null, // of the files that were opened, until the next change
  written: null,
};

export const view = new View(() => {
  app.state.window = view.opened ? null : [view.start, view.end];
  writeUrlSoon();
});
const writeUrlSoon = debounced(() => writeUrl(), 200);

const acts = {};
let urlTurn = 0; // of reading and writing the address: both take a moment, and the last one counts
let stepOwed = false; // whether the next address written is one that Back leads away from

/** Say what follows from a change: `render`, `redraw`, `dress`, and `open` for files. */
export function connect(given) {
  Object.assign(acts, given);
}

/** Take a change of the reader's into the state and show what follows from it; Back undoes it. */
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

/** Show all of the state once the reader's click or key has had its effect on what is there. */
export function showAgain() {
  app.work?.abort();
  app.work = null;
  byId("stage").setAttribute("aria-busy", "true");
  afterPress(acts.render);
}

/** Take the state from the address; return whether it is another than was written there. */
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

/** Write the state into the address, as a new one in the history if Back is to undo it. */
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
