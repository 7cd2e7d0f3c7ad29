// Mouse, touch and keyboard input of a track: pan, zoom, select, follow a microbatch, measure.

import { MARGIN } from "./geometry.js";

const CLICK = 4; // pixels; a shorter movement is a click

/** Add the listeners of a track. */
export function listenTo(track) {
  const { canvas } = track;
  const held = new Map(); // pressed pointers, by id
  let moved = 0;
  let spread = 0;
  let from = null; // start time of a range in progress

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return; // a context menu may swallow the release
    held.set(event.pointerId, place(event));
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    moved = 0;
    spread = distance(held);
    from = event.shiftKey && track.timeline ? track.timeWithin(place(event).x) : null;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!track.timeline) return;
    if (event.pointerType === "mouse" && event.buttons === 0) held.clear(); // released elsewhere
    const now = place(event);
    const before = held.get(event.pointerId);
    if (before === undefined) return track.choose(track.passAt(now.x, now.y));
    held.set(event.pointerId, now);
    moved += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
    if (from !== null) {
      if (moved > CLICK) track.shared.onRange(stretchOf(from, track.timeWithin(now.x)), false);
    } else if (held.size === 2) spread = pinch(track, held, spread);
    else if (moved > CLICK) {
      track.choose(-1);
      track.view.pan((before.x - now.x) / track.scale);
    }
  });
  const release = (event) => {
    const clicked = held.delete(event.pointerId) && moved <= CLICK && event.type === "pointerup";
    if (from !== null) {
      const range = clicked ? null : stretchOf(from, track.timeWithin(place(event).x));
      from = null;
      track.shared.onRange(range, true);
    } else if (clicked && track.timeline) click(track, place(event));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => held.size || track.choose(-1));
  canvas.addEventListener("blur", () => track.hideTip());
  canvas.addEventListener("wheel", (event) => turn(track, event), { passive: false });
  canvas.addEventListener("dblclick", (event) => track.view.zoom(2, track.timeAt(place(event).x)));
  canvas.addEventListener("keydown", (event) => press(track, event));
}

function place(event) {
  return { x: event.offsetX, y: event.offsetY };
}

/** Return the time range between two times; null if they are equal. */
function stretchOf(a, b) {
  return a === b ? null : [Math.min(a, b), Math.max(a, b)];
}

function distance(held) {
  const [a, b] = [...held.values()];
  return b ? Math.abs(a.x - b.x) + 1 : 0;
}

function pinch(track, held, spread) {
  const now = distance(held);
  const [a, b] = [...held.values()];
  if (spread && now) track.view.zoom(now / spread, track.timeAt((a.x + b.x) / 2));
  return now;
}

function click(track, { x, y }) {
  const at = track.passAt(x, y);
  if (at < 0) return track.shared.onFollow(null);
  follow(track, at);
  track.choose(at);
}

/** Ctrl or pinch zooms, horizontal scrolling pans; plain scrolling is left to the page. */
function turn(track, event) {
  if (!track.timeline) return;
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.ctrlKey || event.metaKey || event.altKey) {
    event.preventDefault();
    track.view.zoom(Math.exp(-event.deltaY * 0.004), track.timeAt(place(event).x));
  } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
    event.preventDefault();
    track.view.pan(sideways / track.scale);
  }
}

function press(track, event) {
  const { view } = track;
  const acts = {
    ArrowLeft: () => step(track, -1, event.shiftKey),
    ArrowRight: () => step(track, 1, event.shiftKey),
    ArrowUp: () => changeDevice(track, -1),
    ArrowDown: () => changeDevice(track, 1),
    "+": () => view.zoom(1.5),
    "=": () => view.zoom(1.5),
    "-": () => view.zoom(1 / 1.5),
    0: () => view.fit(),
    Home: () => view.show(view.first),
    End: () => view.show(view.last),
    m: () => measure(track),
    "/": () => track.shared.onSeek(),
    Enter: () => follow(track, track.chosen),
    " ": () => follow(track, track.chosen),
    Escape: () => letGo(track),
  };
  const act = acts[event.key];
  if (!act || !track.timeline || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
}

/** Measure the selected pass; at the next press, from it to the pass selected then. */
function measure(track) {
  const { timeline, chosen } = track;
  if (chosen < 0) return;
  const began = track.shared.range() === null ? chosen : (track.measuredFrom ?? chosen);
  track.measuredFrom = began;
  const starts = [began, chosen].map((at) => timeline.start[at]);
  const ends = [began, chosen].map((at) => timeline.end[at]);
  track.shared.onRange([Math.min(...starts), Math.max(...ends)], true);
}

function step(track, by, panned) {
  if (panned) return track.view.pan(by * track.view.span * 0.15);
  const { timeline } = track;
  if (track.chosen < 0) return track.choose(timeline.nearest(0, track.timeAt(MARGIN.left)), true);
  const device = timeline.deviceOf(track.chosen);
  const [low, high] = [timeline.offsets[device], timeline.offsets[device + 1] - 1];
  track.choose(Math.min(Math.max(track.chosen + by, low), high), true);
}

function changeDevice(track, by) {
  const { timeline } = track;
  if (track.chosen < 0) return step(track, 0, false);
  const device = timeline.deviceOf(track.chosen) + by;
  if (device < 0 || device >= timeline.devices) return;
  const near = timeline.nearest(device, timeline.start[track.chosen]);
  if (near >= 0) track.choose(near, true);
}

/** Follow the microbatch of a pass, or stop following it. */
function follow(track, at) {
  if (at < 0) return;
  const microbatch = track.timeline.microbatch[at];
  track.shared.onFollow(track.shared.follow() === microbatch ? null : microbatch);
}

function letGo(track) {
  track.choose(-1);
  track.measuredFrom = null;
  track.shared.onLetGo();
}
