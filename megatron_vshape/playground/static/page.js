// The page's state and what is known besides it: taken from the URL, changed, written back.

import { byId, debounced } from "./dom.js";
import { afterPress } from "./press.js";
import { writeState } from "./state.js";
import { View } from "./view.js";

const VIEW_ONLY = new Set(["follow", "block", "window", "theme", "step", "tab", "active"]);
const REDRAWN = new Set(["follow", "block", "theme"]); // what needs no schedule made

export const app = {
  state: null,
  offers: null,
  embedded: null,
  tracks: [],
  shown: [],
  work: null,
  bounds: "",
  written: "",
};

export const view = new View(() => rememberWindow());
const rememberWindow = debounced(() => {
  app.state.window = view.whole ? null : [view.start, view.end];
  writeUrl();
}, 200);

const acts = {};

/** Say what follows from a change: `render`, `redraw`, `dress`, and `open` for files. */
export function connect(given) {
  Object.assign(acts, given);
}

/** Take a change of the reader's into the state and show what follows from it. */
export function change(patch) {
  if (patch.files) return acts.open(patch.files);
  const sameMaterial = Object.keys(patch).every((key) => VIEW_ONLY.has(key));
  Object.assign(app.state, patch);
  if (!sameMaterial) Object.assign(app.state, { window: null, follow: null });
  if ("theme" in patch) acts.dress();
  writeUrl();
  if (Object.keys(patch).every((key) => REDRAWN.has(key))) acts.redraw();
  else renderSoon();
}

/** Show the changed state once the reader's click or key has had its effect on what is there. */
function renderSoon() {
  app.work?.abort();
  app.work = null;
  byId("stage").setAttribute("aria-busy", "true");
  afterPress(acts.render);
}

/** Show all of the state once more. */
export function showAgain() {
  return acts.render();
}

/** Write the state into the address. */
export async function writeUrl() {
  const { text, whole } = await writeState(app.state);
  app.written = text;
  app.linkWhole = whole;
  history.replaceState(null, "", `#${text}`);
}
