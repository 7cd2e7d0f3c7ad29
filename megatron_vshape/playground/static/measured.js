// A measured trace beside what was planned.

import { Refusal } from "./api.js";
import { ask, requestOf } from "./asking.js";
import { byId, element, refill } from "./dom.js";
import { markField } from "./form.js";
import { factsTable } from "./numbers.js";
import { app, change } from "./page.js";
import { captioned, clearPictures, highestOf, setPictures, shared } from "./pictures.js";
import { drawShare } from "./share.js";

/** Show a trace under its plan, or ask for one. */
export async function showMeasured(signal) {
  const given = app.offers.files.filter(({ sort }) => sort === "trace");
  const load = (event) => change({ files: [...event.target.files] });
  const picker = element("input", { type: "file", id: "trace-file", accept: ".json", "data-field": "trace", change: load });
  const offered = given.map(({ key, name }) =>
    element("button", { type: "button", class: "button", id: `trace-${key}`, click: () => change({ trace: { key } }) }, name));
  refill(
    byId("lead"),
    element("p", {}, "A trace that training wrote with --pipeline-trace, beside what was planned. Passes that ran late by more than a tenth of their time, through no fault of what they waited for, are marked."),
    element("label", { class: "field" }, element("span", {}, "Trace file"), picker),
    element("div", { class: "row offered" }, ...offered),
  );
  if (!app.state.trace) return clearPictures();
  try {
    const file = app.state.trace.key ? { key: app.state.trace.key } : app.state.trace;
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
