// Pictures: timelines stacked on one time axis, with the tool bar above.

import { barParts } from "./bar.js";
import { byId, element, refill } from "./dom.js";
import { playMorph } from "./morph.js";
import { app, change, view } from "./page.js";
import { setTheme, themeColours } from "./theme.js";
import { rangeText } from "./numbers.js";
import { makeTip } from "./tip.js";
import { Track } from "./track.js";
import { unitsFor } from "./units.js";

/** State shared by all tracks. */
export const shared = {
  view,
  tip: makeTip(byId("tip")),
  theme: () => themeColours(app.offers.palettes),
  unitsOf: (timeline) => unitsFor(timeline.meta.facts, app.state.unit),
  follow: () => app.state.follow,
  onFollow: (microbatch) => change({ follow: microbatch }),
  range: () => drawnRange ?? app.state.range,
  onRange,
  onLetGo: () => change({ follow: null, range: null }),
  onSeek: () => byId("find").focus(),
};

let drawnRange = null; // while it is drawn

/** Set the measured time range, or none; it becomes part of the state once it is `done`. */
function onRange(range, done) {
  drawnRange = done ? null : range;
  if (done) return change({ range });
  drawRangeNote();
  for (const track of app.tracks) track.request();
}

function drawRangeNote() {
  const range = shared.range();
  const lines = range === null ? [] : app.shown.map(({ timeline, title }) => {
    const said = rangeText(timeline, range, shared.unitsOf(timeline));
    return element("p", {}, app.shown.length > 1 ? `${title}: ${said}` : said);
  });
  byId("range").replaceChildren(...lines);
}

/** Show the pass with this name in the first picture that has one; return whether there is any. */
function seek(name) {
  for (const track of app.tracks) {
    const at = track.timeline?.named(name) ?? -1;
    if (at < 0) continue;
    track.seek(at);
    return true;
  }
  return false;
}

/** Return the elements of a timeline: title, picture and notes. */
export function captioned(timeline) {
  return { timeline, title: timeline.meta.title, note: timeline.meta.facts.note };
}

/** Show timelines stacked on one axis that is long enough for `all`. */
export function setPictures(shown, layout = {}, all = shown.map(({ timeline }) => timeline)) {
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
  setBounds(all);
  shown.forEach(({ timeline, title, note, from }, at) => {
    const begins = view.opened && !view.whole ? "; its beginning is shown, All shows the whole" : "";
    const caption = title ? [element("h2", {}, title), element("p", {}, (note ?? "") + begins)] : [];
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
  else view.open();
}

/** Show no timeline. */
export function clearPictures() {
  for (const track of app.tracks) track.close();
  app.tracks = [];
  app.shown = [];
  for (const id of ["numbers", "share", "pictures"]) byId(id).replaceChildren();
  drawBar();
}

function drawBar() {
  drawRangeNote();
  if (!app.shown.length) return refill(byId("bar"));
  const timelines = app.shown.map(({ timeline }) => timeline);
  const parts = barParts({
    state: app.state,
    view,
    palette: shared.theme().palette,
    chunkCount: Math.max(...timelines.map((timeline) => timeline.chunkCount)),
    kinds: new Set(timelines.flatMap((timeline) => [...timeline.kinds])),
    seek,
    change,
  });
  refill(byId("bar"), ...parts);
}

/** Redraw the timelines with the same schedules. */
export function redrawAll() {
  drawBar();
  for (const track of app.tracks) track.request();
}

/** Apply the colors of the theme. */
export function dressAll() {
  setTheme(app.state.theme);
  byId("theme").textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[app.state.theme];
  for (const track of app.tracks) track.dress();
  drawBar();
}

/** Return the peak memory over all devices of the timelines. */
export function highestOf(timelines) {
  return Math.max(...timelines.map((timeline) => timeline.highest));
}
