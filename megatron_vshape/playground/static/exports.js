// Export of the visible pictures as SVG and PNG.

import { decimal, element } from "./dom.js";
import { MARGIN, numberSize, ticksOf } from "./geometry.js";
import { heldNote, limitFits } from "./overlay.js";
import { fontOf } from "./paint.js";

const TITLE = 30;

/** Return the SVG of all tracks, stacked, without the user's marks. */
export function svgOf(tracks, titles) {
  const width = Math.max(...tracks.map((track) => track.width));
  const { skin } = tracks[0];
  const parts = [];
  let y = 0;
  tracks.forEach((track, at) => {
    parts.push(`<g transform="translate(0 ${y})">`);
    parts.push(`<text x="${MARGIN.left}" y="19" class="t">${escapeText(titles[at])}</text>`);
    parts.push(`<g transform="translate(0 ${TITLE})">`, ...svgTrack(track, at), "</g></g>");
    y += TITLE + track.geometry.height;
  });
  const hatch =
    '<pattern id="idle" width="4" height="4" patternUnits="userSpaceOnUse" ' +
    `patternTransform="rotate(45)"><rect width="4" height="4" fill="${skin.idle}"/>` +
    `<rect width="0.9" height="4" fill="${skin.hatchLine}"/></pattern>`;
  const style =
    `text{font:10.5px system-ui,'DejaVu Sans',sans-serif;fill:${skin.quiet}}` +
    `.t{font-size:15px;font-weight:600;fill:${skin.ink}}`;
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${y}" width="${width}" ` +
    `height="${y}"><style>${style}</style><defs>${hatch}</defs>` +
    `<rect width="${width}" height="${y}" fill="${skin.page}"/>${parts.join("\n")}</svg>\n`
  );
}

function escapeText(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
}

const short = (value) => String(Math.round(value * 100) / 100);

function* svgTrack(track, number) {
  const { timeline, geometry, plotWidth } = track;
  const clip = `plot${number}`;
  yield `<clipPath id="${clip}"><rect x="${MARGIN.left}" y="0" width="${plotWidth}" height="${geometry.bottom}"/></clipPath>`;
  yield `<g clip-path="url(#${clip})">`;
  const left = Math.max(track.xOf(timeline.first), MARGIN.left);
  const right = Math.min(track.xOf(timeline.last), MARGIN.left + plotWidth);
  for (let device = 0; device < timeline.devices; device++) {
    const box = `x="${short(left)}" y="${geometry.top(device)}" width="${short(right - left)}"`;
    yield `<rect ${box} height="${geometry.rowInner}" fill="url(#idle)"/>`;
  }
  yield* svgPasses(track);
  if (geometry.heldRow) yield* svgHeld(track);
  yield "</g>";
  if (geometry.heldRow) yield* svgHeldFrame(track);
  yield* svgAxis(track);
}

function* svgPasses(track) {
  const { timeline, geometry, view, skin } = track;
  const paths = Array.from({ length: 3 * timeline.chunkCount }, () => []);
  const numbers = [];
  for (let device = 0; device < timeline.devices; device++) {
    const [low, high] = timeline.range(device, view.start, view.end);
    for (let at = low; at < high; at++) svgPass(track, at, geometry.top(device), paths, numbers);
  }
  for (const [place, boxes] of paths.entries()) {
    if (!boxes.length) continue;
    const [kind, chunk] = [Math.floor(place / timeline.chunkCount), place % timeline.chunkCount];
    yield `<path class="passes" fill="${skin.colours.fill(kind, chunk)}" d="${boxes.join("")}"/>`;
  }
  yield* numbers;
}

function svgPass(track, at, top, paths, numbers) {
  const { timeline, geometry, skin } = track;
  const left = track.xOf(timeline.start[at]);
  const across = track.xOf(timeline.end[at]) - left;
  const [kind, chunk] = [timeline.kind[at], timeline.chunkOf(at)];
  const gap = Math.min(0.8, across * 0.08);
  const high = geometry.rowInner;
  const halves = kind < 3 ? [[kind, 0, high]] : [[1, 0, high / 2], [2, high / 2, high / 2]];
  for (const [part, from, height] of halves) {
    const wide = short(across - gap);
    const box = `M${short(left + gap / 2)} ${short(top + from)}h${wide}v${height}h-${wide}z`;
    paths[part * timeline.chunkCount + chunk].push(box);
  }
  const text = String(timeline.microbatch[at]);
  const size = numberSize(text, across, high);
  if (!size) return;
  const ink = skin.colours.ink(halves[0][0], chunk);
  const [x, y] = [short(left + across / 2), short(top + high / 2 + size * 0.36)];
  numbers.push(
    `<text x="${x}" y="${y}" text-anchor="middle" style="font-size:${size}px;fill:${ink}">${text}</text>`,
  );
}

function* svgHeldFrame(track) {
  const { timeline, geometry, units, plotWidth, skin } = track;
  const { numbers, facts } = timeline.meta;
  const right = MARGIN.left + plotWidth + 6;
  const heading = `<tspan font-weight="600">Activations held</tspan>  ${escapeText(heldNote(track))}`;
  yield `<text x="${MARGIN.left}" y="${geometry.heldFrom - 8}">${heading}</text>`;
  const every = Math.max(1, Math.ceil(12 / geometry.heldRow));
  for (let device = 0; device < timeline.devices; device++) {
    const base = geometry.heldTop(device) + geometry.heldInner;
    if (limitFits(track)) {
      const y = short(base - (facts.limit / geometry.heldMost) * geometry.heldInner);
      const dash = `stroke="${skin.late}" stroke-dasharray="4 3"`;
      yield `<path class="limit" ${dash} d="M${MARGIN.left} ${y}h${plotWidth}"/>`;
    }
    if (device % every) continue;
    const y = base - geometry.heldInner / 2 + 4;
    yield `<text x="${MARGIN.left - 7}" y="${y}" text-anchor="end">${device}</text>`;
    yield `<text x="${right}" y="${y}">${units.held(numbers.peaks[device])}</text>`;
  }
}

function* svgHeld(track) {
  const { timeline, geometry, view, skin } = track;
  for (let device = 0; device < timeline.devices; device++) {
    const base = geometry.heldTop(device) + geometry.heldInner;
    const y = (held) => short(base - (held / geometry.heldMost) * geometry.heldInner);
    const [low, high] = timeline.range(device, view.start, view.end);
    if (low >= high) continue;
    let path = `M${short(track.xOf(timeline.start[low]))} ${base}`;
    for (let at = low; at < high; at++) {
      path += `V${y(timeline.held[at])}H${short(track.xOf(timeline.end[at]))}`;
      path += `V${y(timeline.heldAfter(at))}`;
      if (at + 1 < high) path += `H${short(track.xOf(timeline.start[at + 1]))}`;
    }
    yield `<path class="held" fill="${skin.held}" d="${path}V${base}z"/>`;
  }
}

function* svgAxis(track) {
  const { timeline, geometry, units, plotWidth, skin, view } = track;
  for (let device = 0; device < timeline.devices; device++) {
    const every = Math.max(1, Math.ceil(11 / geometry.row));
    if (device % every) continue;
    const y = geometry.top(device) + geometry.rowInner / 2 + 4;
    yield `<text x="${MARGIN.left - 7}" y="${y}" text-anchor="end">${device}</text>`;
  }
  const origin = (view.start - timeline.first) * units.timeScale;
  const span = view.span * units.timeScale;
  const y = geometry.bottom + 4.5;
  yield `<path stroke="${skin.quiet}" d="M${MARGIN.left} ${y}h${plotWidth}"/>`;
  const { ticks, decimals } = ticksOf(origin, span, plotWidth);
  for (const tick of ticks) {
    const x = MARGIN.left + ((tick - origin) / span) * plotWidth;
    const text = decimal(tick, decimals);
    yield `<text x="${short(x)}" y="${y + 14}" text-anchor="middle">${text}</text>`;
  }
  yield `<text x="${MARGIN.left + plotWidth + 8}" y="${y + 14}">${escapeText(units.timeName)}</text>`;
}

/** Return a PNG of all tracks at twice the screen resolution; null if it would be too large. */
export function pngOf(tracks, titles) {
  const ratio = 2;
  const width = Math.max(...tracks.map((track) => track.width));
  const height = tracks.reduce((sum, track) => sum + TITLE + track.geometry.height, 0);
  const sheet = element("canvas", { width: width * ratio, height: height * ratio });
  const pen = sheet.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = tracks[0].skin.page;
  pen.fillRect(0, 0, width, height);
  let y = 0;
  tracks.forEach((track, at) => {
    pen.fillStyle = track.skin.ink;
    pen.font = fontOf(15, 600);
    pen.textBaseline = "alphabetic";
    pen.fillText(titles[at], MARGIN.left, y + 19);
    const picture = track.picture(ratio);
    pen.drawImage(picture, 0, y + TITLE, track.width, track.geometry.height);
    track.resize();
    y += TITLE + track.geometry.height;
  });
  return new Promise((done) => sheet.toBlob(done, "image/png"));
}
