// Comparison of schedules: on one time axis, and as points of memory and step time.

import { Refusal } from "./api.js";
import { ask, requestOf, timelineRequest, unitsAsked } from "./asking.js";
import { drawChart } from "./chart.js";
import { byId, element, refill } from "./dom.js";
import { entryTitle } from "./entries.js";
import { factsTable } from "./numbers.js";
import { app, change } from "./page.js";
import { captioned, highestOf, setPictures, shared } from "./pictures.js";
import { drawShare } from "./share.js";
import { showOne } from "./single.js";

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
  const high = Math.max(96, 560 / found.length);
  const layout = { withHeld: found.length < 4, high, heldHigh: high * 0.7, heldMost: highestOf(found) };
  setPictures(found.map(captioned), layout);
  drawShare(null, null);
  return failed[0];
}

/** Show memory and step time, and the selected schedule below. */
export async function showFrontier(signal) {
  const host = byId("frontier") ?? element("div", { id: "frontier" });
  const toggle = element(
    "label",
    { class: "check" },
    element("input", { type: "checkbox", id: "plans", checked: app.state.plans, change: (event) => change({ plans: event.target.checked }) }),
    "Add plans within memory limits (takes a while)",
  );
  refill(
    byId("lead"),
    toggle,
    host,
  );
  await askPoints(signal, (points) => refill(host, frontierChart(points, host.clientWidth)));
  if (signal.aborted) return;
  const entry = app.state.entries[app.state.active];
  const { timelines } = await ask(timelineRequest(entry), signal);
  if (!signal.aborted) showOne(timelines[0], entry);
}

/** Request the points of the frontier and draw them as they arrive; stop after a failure. */
async function askPoints(signal, draw) {
  const points = [];
  const told = ({ point }) => {
    if (!point || signal.aborted) return;
    points.push(point);
    draw(points);
  };
  try {
    const answer = await ask(requestOf("frontier", { plans: app.state.plans }), signal, told);
    if (!signal.aborted) draw(answer.header.points);
  } catch (error) {
    if (!signal.aborted) draw([]);
    throw error;
  }
}

function frontierChart(points, width) {
  const active = app.state.entries[app.state.active];
  const chosen = (point) =>
    point.source === active.source &&
    (point.source === "plan" ? isPlanned(point, active) : point.name === active.name);
  return drawChart(points, { width, units: unitsAsked(), chosen, choose: choosePoint });
}

/** Return whether the entry equals the result of selecting this plan's point. */
function isPlanned(point, entry) {
  const usual = entry.objective === "makespan" && !entry.seconds && !entry.chunks;
  return usual && point.limit === entry.limit;
}

function choosePoint(point) {
  const entry =
    point.source === "plan"
      ? { source: "plan", limit: point.limit, limit_in_gib: point.limit_in_gib, objective: "makespan", seconds: null }
      : { source: "name", name: point.name };
  const entries = app.state.entries.map((each, at) => (at === app.state.active ? entry : each));
  change({ entries });
}
