// Measured trace next to its plan.

import { Refusal } from "./api.js";
import { ask, requestOf } from "./asking.js";
import { byId, element, refill } from "./dom.js";
import { markField } from "./form.js";
import { factsTable } from "./numbers.js";
import { app, change } from "./page.js";
import { captioned, clearPictures, highestOf, setPictures, shared } from "./pictures.js";
import { drawShare } from "./share.js";

/** Show a trace below its plan, or ask the user to open one. */
export async function showMeasured(signal) {
  const traces = app.offers.files.filter(({ sort }) => sort === "trace");
  const [given, [example]] = [traces.filter(({ example }) => !example), traces.filter(({ example }) => example)];
  const load = (event) => change({ files: [...event.target.files] });
  const picker = element("input", { type: "file", id: "trace-file", accept: ".json", "data-field": "trace", change: load });
  const offered = given.map(({ key, name }) =>
    element("button", { type: "button", class: "button", id: `trace-${key}`, click: () => change({ trace: { key } }) }, name));
  refill(
    byId("lead"),
    app.state.trace || !example ? null : element("p", {}, "An example, made up: V-Half on 4 devices that stall once. Open a trace of your own:"),
    element("label", { class: "field" }, element("span", {}, "Trace file"), picker),
    element("div", { class: "row offered" }, ...offered),
  );
  const shown = app.state.trace ?? example;
  if (!shown) return clearPictures();
  try {
    const file = shown.key ? { key: shown.key } : shown;
    const { timelines } = await ask(requestOf("measured", { trace: file }), signal);
    if (signal.aborted) return;
    showTrace(timelines);
  } catch (error) {
    if (error instanceof Refusal && error.field === "trace") markField(byId("lead"), "trace", error.message);
    throw error;
  }
}

function showTrace(timelines) {
  const units = shared.unitsOf(timelines[0]);
  byId("numbers").replaceChildren();
  byId("lead").append(factsTable(timelines, units));
  setPictures(timelines.map(captioned), { high: 300, heldHigh: 150, heldMost: highestOf(timelines) });
  drawShare(null, null);
}
