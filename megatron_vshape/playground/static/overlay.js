// Overlays on the passes: axis, rank numbers, followed microbatch, selected pass.

import { decimal } from "./dom.js";
import { MARGIN, numberSize, ticksOf } from "./geometry.js";
import { KIND_NAMES } from "./model.js";
import { fontOf } from "./paint.js";

/** Draw the frame of a picture: rank numbers, peaks, headings, axis. */
export function drawFrame(pen, track) {
  const { timeline, geometry, skin } = track;
  const every = Math.max(1, Math.ceil(11 / geometry.row));
  pen.font = fontOf(Math.min(11, Math.max(8, geometry.row - 1)));
  pen.fillStyle = skin.quiet;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (let device = 0; device < timeline.devices; device += every) {
    const middle = geometry.top(device) + geometry.rowInner / 2 + 0.5;
    pen.fillText(String(device), MARGIN.left - 7, middle);
  }
  if (geometry.heldRow) drawHeldFrame(pen, track);
  drawAxis(pen, track);
}

/** Return the note next to the heading of the memory rows. */
function heldNote({ timeline, units }) {
  const { numbers, facts } = timeline.meta;
  const limit = facts.limit === null ? "" : `, limit ${units.held(facts.limit)}`;
  return `peak ${units.held(Math.max(...numbers.peaks))} ${units.heldName}${limit}`;
}

function drawHeldFrame(pen, track) {
  const { timeline, geometry, skin, units } = track;
  const peaks = timeline.meta.numbers.peaks;
  const highest = Math.max(...peaks);
  const every = Math.max(1, Math.ceil(12 / geometry.heldRow));
  const right = track.width - MARGIN.right + 6;
  pen.font = fontOf(11, 600);
  pen.textAlign = "left";
  pen.fillStyle = skin.ink;
  pen.fillText("Activation memory", MARGIN.left, geometry.heldFrom - 11);
  const from = MARGIN.left + pen.measureText("Activation memory").width + 10;
  pen.font = fontOf(11);
  pen.fillStyle = skin.quiet;
  const text = heldNote(track);
  if (from + pen.measureText(text).width < track.width) pen.fillText(text, from, geometry.heldFrom - 11);
  pen.font = fontOf(Math.min(10.5, Math.max(8, geometry.heldRow - 3)));
  for (let device = 0; device < timeline.devices; device += every) {
    const middle = geometry.heldTop(device) + geometry.heldInner / 2 + 1;
    pen.textAlign = "right";
    pen.fillStyle = skin.quiet;
    pen.fillText(String(device), MARGIN.left - 7, middle);
    pen.textAlign = "left";
    pen.fillStyle = peaks[device] >= highest * 0.999999 ? skin.ink : skin.quiet;
    pen.fillText(units.held(peaks[device]), right, middle);
  }
  drawPeaks(pen, track, peaks);
}

/** Whether the limit is within the memory rows; far above the peaks, only its number is shown. */
function limitFits({ timeline, geometry }) {
  const { limit } = timeline.meta.facts;
  return limit !== null && limit <= geometry.heldMost;
}

function drawPeaks(pen, track, peaks) {
  const { timeline, geometry, skin } = track;
  const { limit } = timeline.meta.facts;
  const [left, right] = [MARGIN.left, track.width - MARGIN.right];
  const line = (device, value, colour, dash) => {
    const base = geometry.heldTop(device) + geometry.heldInner;
    const y = base - (value / geometry.heldMost) * geometry.heldInner;
    pen.strokeStyle = colour;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(left, y);
    pen.lineTo(right, y);
    pen.stroke();
  };
  pen.lineWidth = 1;
  for (let device = 0; device < timeline.devices; device++) {
    if (geometry.heldRow >= 12) line(device, peaks[device], skin.faint, [1, 3]);
    if (limitFits(track)) line(device, limit, skin.late, [4, 3]);
  }
  pen.setLineDash([]);
}

function drawAxis(pen, track) {
  const { view, geometry, skin, units } = track;
  const width = track.plotWidth;
  const scaled = view.span * units.timeScale;
  const origin = (view.start - track.timeline.first) * units.timeScale;
  const { ticks, decimals } = ticksOf(origin, scaled, width);
  const y = geometry.bottom + 4;
  pen.strokeStyle = skin.rule;
  pen.fillStyle = skin.quiet;
  pen.lineWidth = 1;
  pen.font = fontOf(10.5);
  pen.textAlign = "center";
  pen.textBaseline = "top";
  pen.beginPath();
  pen.moveTo(MARGIN.left, y + 0.5);
  pen.lineTo(MARGIN.left + width, y + 0.5);
  for (const tick of ticks) {
    const x = Math.round(MARGIN.left + ((tick - origin) / scaled) * width) + 0.5;
    pen.moveTo(x, y);
    pen.lineTo(x, y + 4);
    if (x > MARGIN.left + width - 14) continue; // the unit is there
    pen.fillText(decimal(tick, decimals), x, y + 8);
  }
  pen.stroke();
  pen.textAlign = "left";
  pen.fillText(units.timeName, MARGIN.left + width + 8, y + 8);
  pen.textBaseline = "middle";
}

function strokePass(pen, track, at, high) {
  const { timeline, geometry } = track;
  const left = track.xOf(timeline.start[at]);
  const across = Math.max(track.xOf(timeline.end[at]) - left, 2);
  if (left > track.width || left + across < 0) return;
  const top = geometry.top(timeline.deviceOf(at));
  pen.strokeRect(left + 0.5, top + 0.5, Math.max(across - 1, 1), high - 1);
}

/** Highlight one microbatch on its path through the stages, and dim the others. */
export function drawFollowed(pen, track, microbatch) {
  const { timeline, geometry, skin } = track;
  const { path, rest } = timeline.passesOf(microbatch);
  if (!path.length) return;
  clipPlot(pen, track, MARGIN.top);
  pen.fillStyle = skin.veil;
  pen.fillRect(0, MARGIN.top - 1, track.width, timeline.devices * geometry.row + 1);
  pen.strokeStyle = skin.ink;
  pen.lineWidth = 1.2;
  pen.lineJoin = "round";
  pen.beginPath();
  path.forEach((at, place) => {
    const y = geometry.top(timeline.deviceOf(at)) + geometry.rowInner / 2;
    const [left, right] = [track.xOf(timeline.start[at]), track.xOf(timeline.end[at])];
    if (place) pen.lineTo(left, y);
    else pen.moveTo(left, y);
    pen.lineTo(right, y);
  });
  pen.stroke();
  for (const at of [...path, ...rest]) fillPass(pen, track, at);
  pen.restore();
}

function fillPass(pen, track, at) {
  const { timeline, geometry, skin } = track;
  const left = track.xOf(timeline.start[at]);
  const across = Math.max(track.xOf(timeline.end[at]) - left, 2.5);
  const top = geometry.top(timeline.deviceOf(at));
  const [kind, chunk] = [timeline.kind[at], timeline.chunkOf(at)];
  const halves = kind < 3 ? [[kind, 0, 1]] : [[1, 0, 0.5], [2, 0.5, 0.5]];
  for (const [part, from, share] of halves) {
    pen.fillStyle = skin.colours.fill(part, chunk);
    pen.fillRect(left, top + from * geometry.rowInner, across, share * geometry.rowInner);
  }
  const text = String(timeline.microbatch[at]);
  const size = numberSize(text, across, geometry.rowInner);
  if (!size) return;
  pen.fillStyle = skin.colours.ink(halves[0][0], chunk);
  pen.font = fontOf(size);
  pen.textAlign = "center";
  pen.fillText(text, left + across / 2, top + geometry.rowInner / 2 + 0.5);
}

/** Mark the pass under the pointer or selected by keyboard, and its last dependency. */
export function drawChosen(pen, track, at) {
  const { timeline, geometry, skin } = track;
  clipPlot(pen, track, MARGIN.top - 4);
  const cause = timeline.cause(at);
  pen.lineWidth = 2;
  pen.strokeStyle = skin.ink;
  strokePass(pen, track, at, geometry.rowInner);
  if (cause !== null && !cause.own) {
    pen.lineWidth = 1.4;
    pen.setLineDash([3, 2]);
    strokePass(pen, track, cause.maker, geometry.rowInner);
    const from = geometry.top(timeline.deviceOf(cause.maker)) + geometry.rowInner / 2;
    const to = geometry.top(timeline.deviceOf(at)) + geometry.rowInner / 2;
    pen.beginPath();
    pen.moveTo(track.xOf(timeline.end[cause.maker]), from);
    pen.lineTo(track.xOf(timeline.start[at]), to);
    pen.stroke();
    pen.setLineDash([]);
  }
  pen.restore();
}

/** Mark a measured time range with its length. */
export function drawRange(pen, track, [from, to]) {
  const { geometry, skin, units } = track;
  const [left, right] = [track.xOf(from), track.xOf(to)];
  clipPlot(pen, track, 0);
  pen.globalAlpha = 0.12;
  pen.fillStyle = skin.ink;
  pen.fillRect(left, MARGIN.top - 2, right - left, geometry.bottom - MARGIN.top + 2);
  pen.globalAlpha = 1;
  pen.strokeStyle = skin.ink;
  pen.fillStyle = skin.ink;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const x of [left, right]) {
    pen.moveTo(Math.round(x) + 0.5, MARGIN.top - 6);
    pen.lineTo(Math.round(x) + 0.5, geometry.bottom);
  }
  pen.stroke();
  pen.font = fontOf(10.5, 600);
  pen.textAlign = "center";
  const middle = (Math.max(left, MARGIN.left) + Math.min(right, MARGIN.left + track.plotWidth)) / 2;
  pen.fillText(`${units.time(to - from)} ${units.timeName}`, middle, MARGIN.top - 12);
  pen.restore();
}

function clipPlot(pen, track, top) {
  pen.save();
  pen.beginPath();
  pen.rect(MARGIN.left, top, track.plotWidth, track.geometry.bottom - top);
  pen.clip();
}

/** Describe a pass: its kind, its times and its last dependency. */
export function describePass(timeline, at, units) {
  const time = (value) => units.time(value - timeline.first);
  const device = timeline.deviceOf(at);
  const cause = timeline.cause(at);
  const lines = [
    `${KIND_NAMES[timeline.kind[at]]} of microbatch ${timeline.microbatch[at]}`,
    `stage ${timeline.stage[at]}, chunk ${timeline.chunkOf(at)}, rank ${device}`,
    `${time(timeline.start[at])} to ${time(timeline.end[at])} ${units.timeName}`,
  ];
  if (cause === null) lines.push("first pass of its rank");
  else if (cause.own) lines.push(`waited for ${timeline.nameOf(cause.maker)} before it`);
  else {
    const where = cause.far ? ` from rank ${timeline.deviceOf(cause.maker)}` : "";
    const ready = `${time(cause.ready)} ${units.timeName}`;
    lines.push(`waited for ${timeline.nameOf(cause.maker)}${where}, there at ${ready}`);
  }
  lines.push(`activation memory ${units.held(timeline.held[at])} ${units.heldName}`);
  return { name: timeline.nameOf(at), lines };
}
