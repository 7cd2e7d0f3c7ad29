// The page: keeps the state, asks for what it stands for, and shows it.

import { Refusal, loadOffers, makeAnswer, makeText } from "./api.js";
import { barParts } from "./bar.js";
import { drawChart } from "./chart.js";
import { byId, debounced, digits, element, saveFile } from "./dom.js";
import { embeddedPage } from "./embedded.js";
import { pngOf, svgOf } from "./exports.js";
import { clearMarks, fileCosts, fillForm, markField } from "./form.js";
import { playMorph } from "./morph.js";
import { factsTable, numberCards } from "./numbers.js";
import { MOST_ENTRIES, readState, writeState } from "./state.js";
import { nextTheme, setTheme, themeColours } from "./theme.js";
import { makeTip } from "./tip.js";
import { Track } from "./track.js";
import { unitsFor } from "./units.js";
import { View } from "./view.js";

const TAB_TITLES = {
  timeline: "Timeline",
  steps: "Four steps",
  compare: "Compare",
  frontier: "Frontier",
  measured: "Measured",
};
const VIEW_ONLY = new Set(["follow", "block", "window", "theme", "step", "tab", "active"]);
const PATIENCE_MS = 250; // what is there sooner needs no word of progress

const app = {
  state: null,
  offers: null,
  embedded: null,
  tracks: [],
  shown: [],
  work: null,
  bounds: "",
  written: "",
};

const view = new View(() => rememberWindow());
const rememberWindow = debounced(() => {
  app.state.window = view.whole ? null : [view.start, view.end];
  writeUrl();
}, 200);

const shared = {
  view,
  palette: null,
  tip: makeTip(byId("tip")),
  theme: themeColours,
  unitsOf: (timeline) => unitsFor(timeline.meta.facts, app.state.unit),
  follow: () => app.state.follow,
  showsBlock: () => app.state.block,
  onFollow: (microbatch) => change({ follow: microbatch }),
};

/** Take a change of the reader's into the state and show what follows from it. */
function change(patch) {
  if (patch.files) return openFiles(patch.files);
  const sameMaterial = Object.keys(patch).every((key) => VIEW_ONLY.has(key));
  Object.assign(app.state, patch);
  if (!sameMaterial) app.state.window = null;
  if ("theme" in patch) dressAll();
  writeUrl();
  if (Object.keys(patch).every((key) => key === "follow" || key === "block" || key === "theme")) {
    drawBar();
    for (const track of app.tracks) track.request();
  } else render();
}

async function writeUrl() {
  const { text, whole } = await writeState(app.state);
  app.written = text;
  app.linkWhole = whole;
  history.replaceState(null, "", `#${text}`);
}

/** Load what the reader opened: told by their keys, they become a schedule, costs or a trace. */
async function openFiles(files) {
  for (const file of files) {
    const opened = { name: file.name, text: await file.text() };
    const sort = sortOf(opened);
    if (sort === "costs") change(fileCosts(app.state, opened));
    else if (sort === "trace") change({ trace: opened, tab: "measured" });
    else if (sort === "schedule") addEntry({ source: "file", file: opened });
    else {
      clearMarks(byId("controls"));
      markField(byId("controls"), "file", `${file.name} is no schedule, no costs and no trace.`);
    }
  }
}

function sortOf({ name, text }) {
  if (name.endsWith(".csv")) return "schedule";
  try {
    const data = JSON.parse(text);
    if (data.traceEvents) return "trace";
    if (data.forward_us) return "costs";
    return data.order ? "schedule" : null;
  } catch {
    return null;
  }
}

function addEntry(entry) {
  const entries = [...app.state.entries];
  if (entries.length < MOST_ENTRIES) entries.push(entry);
  else entries[app.state.active] = entry;
  change({ entries, active: entries.length < MOST_ENTRIES ? entries.length - 1 : app.state.active });
}

/** Return the request for what the state stands for. */
function requestOf(want, more = {}) {
  const { state } = app;
  const file = state.costsFile;
  const costs = file
    ? { file: file.key ? { key: file.key } : file }
    : { ...state.cost, embedding: state.embedding, head: state.head };
  return { want, devices: state.devices, microbatches: state.microbatches, costs, ...more };
}

function timelineRequest(entry) {
  return requestOf("timeline", { schedule: entry });
}

/** Ask for an answer; while it takes long, say how far it is and let the reader cancel. */
async function ask(request, signal, onProgress = () => {}) {
  if (app.embedded) return app.embedded.answer(request.want);
  const began = performance.now();
  let known = {};
  const say = () => showProgress(known, (performance.now() - began) / 1000);
  const timer = setInterval(say, PATIENCE_MS);
  try {
    return await makeAnswer(request, {
      signal,
      onProgress: (news) => {
        known = { ...known, ...news };
        onProgress(news);
      },
    });
  } finally {
    clearInterval(timer);
  }
}

function showProgress(known, seconds) {
  const status = byId("status");
  const words = [`${capital(known.doing ?? "working")} …`, `${seconds.toFixed(1)} s`];
  if (known.value) words.push(`best ${digits(known.value)}`, `bound ${digits(known.bound)}`);
  if (known.of) words.push(`${known.done} of ${known.of}`);
  const progress = element("progress", known.of ? { max: known.of, value: known.done } : {});
  if (status.hidden || status.dataset.busy !== "true") {
    const cancel = element("button", { type: "button", class: "button", click: cancelWork }, "Cancel");
    status.replaceChildren(progress, element("p", {}), cancel);
    status.dataset.busy = "true";
    status.dataset.wrong = "false";
    status.hidden = false;
  }
  status.firstChild.replaceWith(progress);
  status.querySelector("p").textContent = words.join("   ");
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function cancelWork() {
  app.work?.abort();
  showStatus("Cancelled.", { again: true });
}

function showStatus(text, { wrong = false, again = false } = {}) {
  const status = byId("status");
  const code = text.includes("\n");
  const retry = element("button", { type: "button", class: "button", click: render }, "Try again");
  status.replaceChildren(element("p", { class: code ? "code" : null }, text), ...(again ? [retry] : []));
  status.dataset.busy = "false";
  status.dataset.wrong = String(wrong);
  status.hidden = false;
}

/** Show all of the state: the form, the tabs, the pictures. */
async function render() {
  app.work?.abort();
  const work = new AbortController();
  app.work = work;
  if (!app.embedded) fillForm(byId("controls"), app.state, app.offers, change);
  drawTabs();
  drawEntries();
  byId("stage").setAttribute("aria-busy", "true");
  try {
    await SHOWS[app.state.tab](work.signal);
    if (!work.signal.aborted) byId("status").hidden = true;
  } catch (error) {
    if (!work.signal.aborted) showFailure(error);
  } finally {
    if (app.work === work) byId("stage").setAttribute("aria-busy", "false");
  }
}

function showFailure(error) {
  if (!(error instanceof Refusal)) throw error;
  clearMarks(byId("controls"));
  const marked = !app.embedded && markField(byId("controls"), error.field, error.message);
  showStatus(error.message, { wrong: true, again: !marked });
}

function drawTabs() {
  const tabs = Object.entries(TAB_TITLES).filter(([tab]) => !app.embedded || app.embedded.has(tab));
  const made = tabs.map(([tab, title]) => {
    const selected = app.state.tab === tab;
    const act = { click: () => change({ tab, follow: null, window: null }), keydown: stepTabs };
    return element(
      "button",
      { type: "button", role: "tab", id: `tab-${tab}`, "aria-controls": "stage", "aria-selected": String(selected), tabindex: selected ? 0 : -1, ...act },
      title,
    );
  });
  const focused = document.activeElement?.id;
  byId("tabs").replaceChildren(...(made.length > 1 ? made : []));
  if (focused?.startsWith("tab-")) byId(focused)?.focus();
}

function stepTabs(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const tabs = [...byId("tabs").children];
  const next = tabs[(tabs.indexOf(event.target) + by + tabs.length) % tabs.length];
  next.focus();
  next.click();
}

/** Return what an entry is called before its schedule is made. */
function entryTitle(entry) {
  if (entry.source === "plan") return `Plan ≤ ${entry.limit} ${entry.limit_in_gib ? "GiB" : "chunks"}`;
  if (entry.source === "file") return entry.file.name ?? entry.file.key.replace(/^\d+-/, "");
  return app.offers.schedules.find(({ name }) => name === entry.name)?.title ?? entry.name;
}

function drawEntries() {
  const { state } = app;
  if (app.embedded || state.tab === "measured") return byId("entries").replaceChildren();
  const chips = state.entries.map((entry, at) => {
    const title = entryTitle(entry);
    const parts = [element("button", { type: "button", "aria-pressed": String(at === state.active), click: () => change({ active: at, window: null }) }, title)];
    if (state.entries.length > 1) {
      parts.push(element("button", { type: "button", "aria-label": `Remove ${title}`, click: () => removeEntry(at) }, "×"));
    }
    return element("span", { class: "entry", "data-active": String(at === state.active) }, ...parts);
  });
  const more = element("button", { type: "button", class: "plain", click: () => addEntry(nextEntry()) }, "+ Add to compare");
  byId("entries").replaceChildren(...chips, ...(chips.length < MOST_ENTRIES ? [more] : []));
}

function nextEntry() {
  const taken = new Set(app.state.entries.map(({ name }) => name));
  const liked = ["1f1b", "v-min", "v-half", "v-zb", "zb-h1", ...app.offers.schedules.map(({ name }) => name)];
  return { source: "name", name: liked.find((name) => !taken.has(name)) };
}

function removeEntry(at) {
  const entries = app.state.entries.filter((_, place) => place !== at);
  change({ entries, active: Math.min(app.state.active, entries.length - 1), window: null });
}

/** Show timelines one above the other on one axis. */
function setPictures(shown, layout = {}) {
  const host = byId("pictures");
  while (app.tracks.length > shown.length) {
    app.tracks.pop().close();
    host.lastElementChild.remove();
  }
  while (app.tracks.length < shown.length) {
    const box = element("div", { class: "host" });
    host.append(element("figure", {}, element("figcaption"), box));
    app.tracks.push(new Track(box, shared));
  }
  app.shown = shown;
  setBounds(shown.map(({ timeline }) => timeline));
  shown.forEach(({ timeline, title, note, from }, at) => {
    const caption = title ? [element("h2", {}, title), element("p", {}, note ?? "")] : [];
    host.children[at].firstElementChild.replaceChildren(...caption);
    const track = app.tracks[at];
    track.layout = layout;
    track.morph = null;
    const label = `Timeline of ${title || timeline.meta.title}`;
    if (from) playMorph(track, from, timeline, label);
    else track.show(timeline, label);
  });
  drawBar();
}

function setBounds(timelines) {
  const last = Math.max(...timelines.map((timeline) => timeline.last));
  const typical = Math.min(...timelines.map((timeline) => timeline.typical));
  const bounds = `${last} ${typical}`;
  if (bounds !== app.bounds) view.setBounds(0, last, typical);
  app.bounds = bounds;
  const wanted = app.state.window;
  if (wanted) view.show(wanted[0], wanted[1] - wanted[0], false);
  else view.show(0, last, false);
}

function clearPictures() {
  setPicturesTo([]);
  byId("numbers").replaceChildren();
  byId("share").replaceChildren();
}

function setPicturesTo(none) {
  for (const track of app.tracks) track.close();
  app.tracks = [];
  app.shown = none;
  byId("pictures").replaceChildren();
  drawBar();
}

function drawBar() {
  if (!app.shown.length) return byId("bar").replaceChildren();
  const timelines = app.shown.map(({ timeline }) => timeline);
  const parts = barParts({
    state: app.state,
    view,
    palette: app.offers.palette,
    chunkCount: Math.max(...timelines.map((timeline) => timeline.chunkCount)),
    hasPeriod: timelines.some((timeline) => timeline.meta.facts.period !== null),
    change,
  });
  byId("bar").replaceChildren(...parts);
}

function dressAll() {
  setTheme(app.state.theme);
  byId("theme").textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[app.state.theme];
  for (const track of app.tracks) track.dress();
}

const SHOWS = {
  timeline: async (signal) => {
    const entry = app.state.entries[app.state.active];
    const { timelines } = await ask(timelineRequest(entry), signal);
    if (signal.aborted) return;
    byId("lead").replaceChildren();
    showOne(timelines[0], entry);
  },
  steps: showSteps,
  compare: showCompared,
  frontier: showFrontier,
  measured: showMeasured,
};

function showOne(timeline, entry) {
  const { title, facts } = timeline.meta;
  byId("numbers").replaceChildren(...numberCards(timeline, shared.unitsOf(timeline), app.state.gibPerChunk));
  setPictures([{ timeline, title, note: facts.note }]);
  drawShare(timeline, entry);
}

async function showSteps(signal) {
  const entry = app.state.entries[app.state.active];
  const { timelines } = await ask(requestOf("steps", { schedule: entry }), signal);
  if (signal.aborted) return;
  const { step } = app.state;
  const names = ["All four", "1 Block", "2 Repeat", "3 Squeeze", "4 Reorder"];
  const buttons = names.map((name, at) =>
    element("button", { type: "button", class: "button", "aria-pressed": String(at === step), click: () => change({ step: at }) }, name));
  const text = `${timelines[0].meta.title ? entryTitle(entry) : ""} in the paper's four steps, with passes of equal length.`;
  const play = element("button", { type: "button", class: "button main", click: () => playSteps(timelines) }, "Play");
  byId("lead").replaceChildren(
    element("p", {}, text),
    element("div", { class: "row" }, element("span", { class: "group" }, ...buttons), play),
  );
  byId("numbers").replaceChildren();
  const shown = timelines.map((timeline) => ({ timeline, title: timeline.meta.title, note: timeline.meta.facts.note }));
  const before = app.shown[0]?.timeline;
  const from = step > 0 && app.shown.length === 1 && timelines.includes(before) ? before : null;
  const chosen = step === 0 ? shown : [{ ...shown[step - 1], from }];
  setPictures(chosen, step === 0 ? { withHeld: false, high: 210 } : { heldMost: highestOf(timelines) });
  fitAll(timelines);
  if (step > 0) byId("numbers").replaceChildren(...numberCards(timelines[step - 1], shared.unitsOf(timelines[0])));
  drawShare(null, null);
}

function highestOf(timelines) {
  return Math.max(...timelines.map((timeline) => timeline.highest));
}

/** Give every step the same axis, so that one sees the time fall. */
function fitAll(timelines) {
  const last = Math.max(...timelines.map((timeline) => timeline.last));
  if (view.last === last) return;
  view.setBounds(0, last, timelines[0].typical);
  app.bounds = "";
  view.show(0, last, false);
}

async function playSteps() {
  for (const step of [1, 2, 3, 4]) {
    change({ step, follow: null });
    await new Promise((done) => setTimeout(done, 2200));
    if (app.state.tab !== "steps" || app.state.step !== step) return;
  }
}

async function showCompared(signal) {
  const found = [];
  const failed = [];
  for (const entry of app.state.entries) {
    try {
      const { timelines } = await ask(timelineRequest(entry), signal);
      found.push(timelines[0]);
    } catch (error) {
      if (!(error instanceof Refusal) || app.state.entries.length === 1) throw error;
      failed.push(error);
    }
  }
  if (signal.aborted) return;
  if (!found.length) throw failed[0];
  const units = shared.unitsOf(found[0]);
  byId("lead").replaceChildren(factsTable(found, units, app.state.gibPerChunk));
  byId("numbers").replaceChildren();
  const high = Math.max(96, 560 / found.length);
  setPictures(
    found.map((timeline) => ({ timeline, title: timeline.meta.title, note: timeline.meta.facts.note })),
    { withHeld: found.length < 4, high, heldHigh: high * 0.7, heldMost: highestOf(found) },
  );
  drawShare(null, null);
  if (failed.length) throw failed[0];
}

async function showFrontier(signal) {
  const points = [];
  const host = element("div", {});
  const toggle = element(
    "label",
    { class: "check" },
    element("input", { type: "checkbox", id: "plans", checked: app.state.plans, change: (event) => change({ plans: event.target.checked }) }),
    "Add plans within memory limits (takes a while)",
  );
  byId("lead").replaceChildren(
    element("p", {}, "Memory against bubble: what lies on the line is beaten by nothing else. Choose a point to see its timeline."),
    toggle,
    host,
  );
  const redraw = () => host.replaceChildren(frontierChart(points, host.clientWidth));
  const answer = await ask(requestOf("frontier", { plans: app.state.plans }), signal, ({ point }) => {
    if (!point || signal.aborted) return;
    points.push(point);
    redraw();
  });
  if (signal.aborted) return;
  points.splice(0, points.length, ...answer.header.points);
  redraw();
  const entry = app.state.entries[app.state.active];
  const { timelines } = await ask(timelineRequest(entry), signal);
  if (!signal.aborted) showOne(timelines[0], entry);
}

function frontierChart(points, width) {
  const active = app.state.entries[app.state.active];
  const chosen = (point) =>
    point.source === active.source &&
    (point.source === "plan" ? isPlanned(point, active) : point.name === active.name);
  const units = unitsFor({ in_bytes: app.state.costsFile !== null, in_us: false }, "");
  return drawChart(points, { width, units, chosen, choose: choosePoint });
}

/** Whether an entry is what choosing the point of a plan makes of it. */
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

async function showMeasured(signal) {
  const given = app.offers.files.filter(({ sort }) => sort === "trace");
  const load = (event) => change({ files: [...event.target.files] });
  const picker = element("input", { type: "file", id: "trace-file", accept: ".json", "data-field": "trace", change: load });
  const offered = given.map(({ key, name }) =>
    element("button", { type: "button", class: "button", click: () => change({ trace: { key } }) }, name));
  byId("lead").replaceChildren(
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
  const shown = timelines.map((timeline) => ({ timeline, title: timeline.meta.title, note: timeline.meta.facts.note }));
  setPictures(shown, { high: 300, heldHigh: 150, heldMost: highestOf(timelines) });
  drawShare(null, null);
}

/** Draw the buttons that take the picture away, and the commands that make it again. */
function drawShare(timeline, entry) {
  const button = (text, act, id) => element("button", { type: "button", class: "button", id, click: act }, text);
  const buttons = [button("SVG", saveSvg, "save-svg"), button("PNG", savePng, "save-png")];
  if (!app.embedded) buttons.unshift(button("Copy link", copyLink, "copy-link"));
  if (timeline && (!app.embedded || app.embedded.hasText("schedule-file"))) {
    buttons.push(button("Schedule JSON", () => saveMade(entry, "schedule-file", ".json"), "save-json"));
  }
  if (timeline && (!app.embedded || app.embedded.hasText("trace-file"))) {
    buttons.push(button("Perfetto trace", () => saveMade(entry, "trace-file", ".trace.json"), "save-trace"));
  }
  const commands = timeline ? commandsOf(timeline) : [];
  byId("share").replaceChildren(element("div", { class: "row" }, ...buttons), ...commands);
}

function commandsOf(timeline) {
  const { facts, devices, microbatches } = timeline.meta;
  const name = facts.train || `${fileStem()}.json`;
  const saved = facts.train ? "" : ` --export ${name}`; // trained from the file, proved as it is
  const train = `--pipeline-schedule ${name} --pipeline-model-parallel-size ${devices} --micro-batch-size 1 --global-batch-size ${microbatches}`;
  return [
    commandRow("train", "Train", train),
    ...(facts.recipe ? [commandRow("recipe", "Make", `megatron-vshape ${facts.recipe}${saved}`)] : []),
  ];
}

function commandRow(id, title, text) {
  const copy = element("button", { type: "button", class: "button", "aria-label": `Copy: ${title}`, click: (event) => copyText(text, event.target) }, "Copy");
  return element("div", { class: "command" }, element("span", {}, title), element("code", { id: `command-${id}`, tabindex: 0 }, text), copy);
}

async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it by hand";
  }
  setTimeout(() => (button.textContent = before), 1400);
}

async function copyLink(event) {
  await writeUrl();
  await copyText(location.href, event.target);
  if (!app.linkWhole) {
    showStatus("The link is without the files you opened: they are too large for it. Send them along.");
  }
}

function fileStem() {
  const title = app.shown[0]?.timeline.meta.title ?? "schedule";
  const plain = title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "");
  return `${plain || "schedule"}-d${app.state.devices}-m${app.state.microbatches}`;
}

function titlesShown() {
  return app.shown.map(({ timeline, title }) => title || timeline.meta.title);
}

function saveSvg() {
  saveFile(`${fileStem()}.svg`, svgOf(app.tracks, titlesShown()), "image/svg+xml");
}

async function savePng() {
  saveFile(`${fileStem()}.png`, await pngOf(app.tracks, titlesShown()));
}

async function saveMade(entry, want, suffix) {
  const request = requestOf(want, { schedule: entry });
  try {
    const text = app.embedded ? await app.embedded.text(want) : await makeText(request);
    saveFile(fileStem() + suffix, text, "application/json");
  } catch (error) {
    showStatus(error.message, { wrong: true });
  }
}

/** A page without a server has one schedule, whatever the link says. */
function keepToEmbedded(state) {
  const { devices, microbatches, name } = app.embedded.state;
  Object.assign(state, { devices, microbatches, entries: [{ source: "name", name }], active: 0 });
  if (!app.embedded.has(state.tab)) state.tab = "timeline";
}

async function start() {
  app.embedded = await embeddedPage();
  if (app.embedded) byId("page").classList.add("alone");
  if (app.embedded) byId("controls").remove();
  app.offers = app.embedded?.offers ?? (await loadOffers());
  app.state = await readState(location.hash.slice(1));
  if (app.embedded) keepToEmbedded(app.state);
  shared.palette = app.offers.palette;
  byId("controls")?.addEventListener("submit", (event) => event.preventDefault());
  byId("theme").addEventListener("click", () => change({ theme: nextTheme(app.state.theme) }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dressAll);
  window.addEventListener("hashchange", async () => {
    if (location.hash.slice(1) === app.written) return;
    app.state = await readState(location.hash.slice(1));
    if (app.embedded) keepToEmbedded(app.state);
    dressAll();
    render();
  });
  dressAll();
  await render();
}

start();
