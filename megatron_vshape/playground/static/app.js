// Entry point: restores the state from the URL and displays it.

import { Refusal, loadOffers } from "./api.js";
import { showStatus } from "./asking.js";
import { showCompared } from "./compare.js";
import { byId } from "./dom.js";
import { embeddedPage } from "./embedded.js";
import { drawEntries, drawTabs, openFiles } from "./entries.js";
import { showEstimate } from "./estimate.js";
import { fillForm, markField } from "./form.js";
import { app, change, connect, readUrl } from "./page.js";
import { clearPictures, dressAll, redrawAll, shared } from "./pictures.js";
import { showSteps, showTimeline } from "./single.js";
import { nextTheme } from "./theme.js";

const SHOWS = {
  timeline: showTimeline,
  steps: showSteps,
  compare: showCompared,
  estimate: showEstimate,
};

/** Display the complete state: form, tabs and pictures. */
async function render() {
  app.work?.abort();
  const work = new AbortController();
  app.work = work;
  if (!app.embedded) fillForm(byId("controls"), app.state, app.offers, change);
  if (app.complaint) markField(byId("controls"), "file", app.complaint);
  byId("page").classList.toggle("alone", Boolean(app.embedded) || app.state.tab === "estimate");
  drawTabs();
  drawEntries();
  byId("stage").setAttribute("aria-busy", "true");
  try {
    const wrong = await SHOWS[app.state.tab](work.signal);
    if (work.signal.aborted) return;
    byId("status").hidden = true;
    if (wrong) showWrong(wrong);
  } catch (error) {
    if (!work.signal.aborted) showFailure(error);
  } finally {
    if (app.work === work) byId("stage").setAttribute("aria-busy", "false");
  }
}

/** Clear the display of the earlier state and show the error; rethrow an unexpected one. */
function showFailure(error) {
  clearPictures();
  if (app.state.tab !== "estimate") byId("lead").replaceChildren();
  showWrong(error);
  if (!(error instanceof Refusal)) throw error;
}

function showWrong({ field = "", message }) {
  const marked = !app.embedded && markField(byId("controls"), field, message);
  showStatus(message, { wrong: true, again: !marked });
}

/** Display the state in the address, if it has changed. */
async function showUrl() {
  if (!(await readUrl())) return;
  const { tabs } = app.offers;
  if (!tabs.some(({ name }) => name === app.state.tab)) app.state.tab = tabs[0].name;
  if (app.embedded) keepToEmbedded(app.state);
  dressAll();
  await render();
}

/** A page without a server has one schedule, regardless of the link. */
function keepToEmbedded(state) {
  const { devices, microbatches, name } = app.embedded.state;
  Object.assign(state, { devices, microbatches, entries: [{ source: "name", name }], active: 0 });
}

/** Load the choices; return whether that succeeded. */
async function load() {
  try {
    app.embedded = await embeddedPage();
    app.offers = app.embedded?.offers ?? (await loadOffers());
    return true;
  } catch (error) {
    showStatus(error.message, { wrong: true });
    return false;
  }
}

async function start() {
  connect({ render, redraw: redrawAll, dress: dressAll, open: openFiles });
  if (!(await load())) return;
  if (app.embedded) byId("controls").remove();
  byId("controls")?.addEventListener("submit", (event) => event.preventDefault());
  byId("theme").addEventListener("click", () => change({ theme: nextTheme(app.state.theme) }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dressAll);
  window.addEventListener("hashchange", showUrl);
  await showUrl();
}

start();
