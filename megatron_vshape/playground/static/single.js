// One schedule: its timeline, and its four steps.

import { ask, requestOf, timelineRequest } from "./asking.js";
import { byId, element, refill } from "./dom.js";
import { entryTitle } from "./entries.js";
import { numberCards } from "./numbers.js";
import { app, change } from "./page.js";
import { captioned, highestOf, setPictures, shared } from "./pictures.js";
import { drawShare } from "./share.js";

/** Show the timeline of the selected schedule. */
export async function showTimeline(signal) {
  const entry = app.state.entries[app.state.active];
  const { timelines } = await ask(timelineRequest(entry), signal);
  if (signal.aborted) return;
  refill(byId("lead"));
  showOne(timelines[0], entry);
}

/** Show a timeline with its key figures. */
function showOne(timeline, entry) {
  byId("numbers").replaceChildren(...numberCards(timeline, shared.unitsOf(timeline), app.state.gibPerChunk));
  setPictures([captioned(timeline)]);
  drawShare(timeline, entry);
}

/** Show all four steps, or one of them. */
export async function showSteps(signal) {
  const entry = app.state.entries[app.state.active];
  const { timelines } = await ask(requestOf("steps", { schedule: entry }), signal);
  if (signal.aborted) return;
  const { step } = app.state;
  const names = ["All four", "1 Block", "2 Repeat", "3 Squeeze", "4 Reorder"];
  const buttons = names.map((name, at) =>
    element("button", { type: "button", class: "button", id: `step-${at}`, "aria-pressed": String(at === step), click: () => change({ step: at }) }, name));
  const text = `${timelines[0].meta.title ? entryTitle(entry) : ""} in the paper's four steps, with passes of equal length.`;
  const play = element("button", { type: "button", class: "button main", id: "play", click: () => playSteps() }, "Play");
  refill(
    byId("lead"),
    element("p", {}, text),
    element("div", { class: "row" }, element("span", { class: "group" }, ...buttons), play),
  );
  byId("numbers").replaceChildren();
  const shown = timelines.map(captioned);
  const before = app.shown[0]?.timeline;
  const from = step > 0 && app.shown.length === 1 && timelines.includes(before) ? before : null;
  const chosen = step === 0 ? shown : [{ ...shown[step - 1], from }];
  const layout = step === 0 ? { withHeld: false, high: 210 } : { heldMost: highestOf(timelines) };
  setPictures(chosen, layout, timelines); // on one axis, which shows that the time decreases
  if (step > 0) byId("numbers").replaceChildren(...numberCards(timelines[step - 1], shared.unitsOf(timelines[0])));
  drawShare(null, null);
}

async function playSteps() {
  for (const step of [1, 2, 3, 4]) {
    change({ step, follow: null }, { undoable: step === 1 });
    await new Promise((done) => setTimeout(done, 2200));
    if (app.state.tab !== "steps" || app.state.step !== step) return;
  }
}
