// Requests for the current state, with progress and error messages.

import { makeAnswer } from "./api.js";
import { byId, element } from "./dom.js";
import { app, showAgain } from "./page.js";
import { clearPictures } from "./pictures.js";
import { unitsFor } from "./units.js";

const PATIENCE_MS = 250; // no progress message for faster answers

/** Return the request for the current state. */
export function requestOf(want, more = {}) {
  const { state } = app;
  const costs = state.costsFile
    ? { file: state.costsFile }
    : { ...state.cost, embedding: state.embedding, head: state.head };
  return { want, devices: state.devices, microbatches: state.microbatches, costs, ...more };
}

/** Return the units at the selected costs. */
function unitsAsked() {
  const measured = app.state.costsFile !== null;
  return unitsFor({ in_bytes: measured }, app.state.unit);
}

/** Return the request for the timeline of a schedule. */
export function timelineRequest(entry) {
  return requestOf("timeline", { schedule: entry });
}

/** Send a request; if it is slow, show its progress and a cancel button. */
export async function ask(request, signal) {
  if (app.embedded) return app.embedded.answer(request.want);
  return withProgress((onProgress) => makeAnswer(request, { signal, onProgress }));
}

/** Start work that reports its progress to a callback; if it is slow, show that and a cancel button. */
export async function withProgress(start) {
  const began = performance.now();
  let known = {};
  const say = () => showProgress(known, (performance.now() - began) / 1000);
  const timer = setInterval(say, PATIENCE_MS);
  try {
    return await start((news) => {
      known = { ...known, ...news };
    });
  } finally {
    clearInterval(timer);
  }
}

function showProgress(known, seconds) {
  const status = byId("status");
  const { time, timeName } = unitsAsked();
  const words = [`${capital(known.doing ?? "working")} …`];
  if (known.value) words.push(`best ${time(known.value)}`, `bound ${time(known.bound)} ${timeName}`);
  const progress = element("progress", {});
  if (status.hidden || status.dataset.busy !== "true") {
    const cancel = element("button", { type: "button", class: "button", click: cancelWork }, "Cancel");
    const clock = element("span", { "aria-hidden": "true" }); // not read out at every tick
    status.replaceChildren(progress, element("p", {}), clock, cancel);
    status.dataset.busy = "true";
    status.dataset.wrong = "false";
    status.hidden = false;
  }
  const [said, text] = [status.querySelector("p"), words.join("   ")];
  if (said.textContent !== text) said.textContent = text;
  status.querySelector("span").textContent = `${seconds.toFixed(1)} s`;
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function cancelWork() {
  app.work?.abort();
  clearPictures();
  showStatus("Cancelled.", { again: true });
}

/** Show the outcome; with `again`, offer to try again. */
export function showStatus(text, { wrong = false, again = false } = {}) {
  const status = byId("status");
  const code = text.includes("\n");
  const retry = element("button", { type: "button", class: "button", click: showAgain }, "Try again");
  const more = again && app.state.tab !== "estimate" ? [retry] : []; // which has a button of its own
  status.replaceChildren(element("p", { class: code ? "code" : null }, text), ...more);
  status.dataset.busy = "false";
  status.dataset.wrong = String(wrong);
  status.hidden = false;
}
