// Painting of passes and memory rows onto one tile of a picture.
//
// If passes are narrower than a few pixels, a row is one line of pixels with the mean color of its
// passes, which costs a few additions per pass. Otherwise, every pass is a box.

import { numberSize } from "./geometry.js";

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

/** Return the font of the picture's texts. */
export function fontOf(size, weight = 400) {
  return `${weight} ${size}px ${FONT}`;
}

/** Return the colors of a timeline's passes: fill and ink by kind and chunk. */
export function coloursOf(palette, chunkCount) {
  const place = Math.min(chunkCount, palette.fills.length) - 1;
  const last = palette.fills[place][0].length - 1;
  const pick = (table, kind, chunk) => table[place][kind][Math.min(chunk, last)];
  return {
    fill: (kind, chunk) => pick(palette.fills, kind, chunk),
    ink: (kind, chunk) => pick(palette.inks, kind, chunk),
  };
}

/** Whether passes are wide enough for separate boxes. */
export function isBoxed(timeline, scale) {
  return timeline.typical * scale >= 3.5;
}

/** Paint one tile: `geometry` has the rows' positions, `time0` and `scale` map times to pixels. */
export function paintTile(context, timeline, geometry, time0, scale, width, skin) {
  paintBubbles(context, timeline, geometry, time0, scale, width, skin);
  if (isBoxed(timeline, scale)) {
    paintBoxes(context, timeline, geometry, time0, scale, width, skin);
  } else {
    paintLines(context, timeline, geometry, time0, scale, width, skin);
  }
  if (geometry.heldRow) paintHeld(context, timeline, geometry, time0, scale, width, skin);
}

function paintBubbles(context, timeline, geometry, time0, scale, width, skin) {
  const left = Math.max((timeline.first - time0) * scale, 0);
  const right = Math.min((timeline.last - time0) * scale, width);
  if (right <= left) return;
  for (let device = 0; device < timeline.devices; device++) {
    const top = geometry.top(device);
    context.fillStyle = skin.idle;
    context.fillRect(left, top, right - left, geometry.rowInner);
    context.fillStyle = skin.hatch;
    context.fillRect(left, top, right - left, geometry.rowInner);
  }
}

/** Return the hatched square that fills idle time. */
export function makeHatch(context, colour, ratio) {
  const size = 8;
  const square = document.createElement("canvas");
  square.width = square.height = size * ratio;
  const pen = square.getContext("2d");
  pen.scale(ratio, ratio);
  pen.strokeStyle = colour;
  pen.lineWidth = 0.9;
  pen.beginPath();
  for (const shift of [-size, -size / 2, 0, size / 2, size]) {
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
  }
  pen.stroke();
  const hatch = context.createPattern(square, "repeat");
  hatch.setTransform(new DOMMatrix().scale(1 / ratio));
  return hatch;
}

function paintBoxes(context, timeline, geometry, time0, scale, width, skin) {
  const classes = 3 * timeline.chunkCount;
  const boxes = Array.from({ length: classes }, () => []);
  const { chunkCount } = timeline;
  for (let device = 0; device < timeline.devices; device++) {
    const [low, high] = timeline.range(device, time0, time0 + width / scale);
    const top = geometry.top(device);
    for (let at = low; at < high; at++) {
      const left = (timeline.start[at] - time0) * scale;
      const across = (timeline.end[at] - timeline.start[at]) * scale;
      const chunk = timeline.meta.chunks[timeline.stage[at]];
      const kind = timeline.kind[at];
      if (kind < 3) boxes[kind * chunkCount + chunk].push(left, top, across, geometry.rowInner, at);
      else {
        const half = geometry.rowInner / 2;
        boxes[chunkCount + chunk].push(left, top, across, half, at);
        boxes[2 * chunkCount + chunk].push(left, top + half, across, half, -1);
      }
    }
  }
  const gap = Math.min(0.8, timeline.typical * scale * 0.08);
  boxes.forEach((found, place) => {
    const [kind, chunk] = [Math.floor(place / chunkCount), place % chunkCount];
    context.fillStyle = skin.colours.fill(kind, chunk);
    for (let each = 0; each < found.length; each += 5) {
      const across = found[each + 2];
      const less = across > 3 * gap ? gap : 0;
      context.fillRect(found[each] + less / 2, found[each + 1], across - less, found[each + 3]);
    }
  });
  boxes.forEach((found, place) => {
    const [kind, chunk] = [Math.floor(place / chunkCount), place % chunkCount];
    numberBoxes(context, timeline, found, skin.colours.ink(kind, chunk), geometry, scale);
  });
}

/** Write the microbatches in one size that fits typical passes, or none. */
function numberBoxes(context, timeline, found, ink, geometry, scale) {
  const longest = String(timeline.meta.microbatches - 1);
  const size = numberSize(longest, timeline.typical * scale, geometry.rowInner);
  if (!size) return;
  context.fillStyle = ink;
  context.font = fontOf(size);
  context.textAlign = "center";
  context.textBaseline = "middle";
  const middle = geometry.rowInner / 2 + 0.5;
  for (let each = 0; each < found.length; each += 5) {
    const at = found[each + 4];
    if (at < 0) continue;
    const text = String(timeline.microbatch[at]);
    if (numberSize(text, found[each + 2], geometry.rowInner) < size) continue;
    context.fillText(text, found[each] + found[each + 2] / 2, found[each + 1] + middle);
  }
}

/** Return red, green and blue of every kind and chunk, for mixing. */
export function mixingTable(colours, chunkCount) {
  const table = new Float32Array(4 * chunkCount * 3);
  for (let kind = 0; kind < 3; kind++) {
    for (let chunk = 0; chunk < chunkCount; chunk++) {
      const text = colours.fill(kind, chunk);
      for (let part = 0; part < 3; part++) {
        const level = parseInt(text.slice(1 + 2 * part, 3 + 2 * part), 16);
        table[3 * (kind * chunkCount + chunk) + part] = level;
        if (kind > 0) table[3 * (3 * chunkCount + chunk) + part] += level / 2;
      }
    }
  }
  return table;
}

function paintLines(context, timeline, geometry, time0, scale, width, skin) {
  const ratio = skin.ratio;
  const columns = Math.ceil(width * ratio);
  const line = document.createElement("canvas");
  line.width = columns;
  line.height = timeline.devices;
  const pen = line.getContext("2d");
  const image = pen.createImageData(columns, timeline.devices);
  const mixed = new Float32Array(columns * 4);
  for (let device = 0; device < timeline.devices; device++) {
    mixed.fill(0);
    mixRow(timeline, device, time0, scale * ratio, columns, skin.mixing, mixed);
    const base = device * columns * 4;
    for (let column = 0; column < columns; column++) {
      const from = column * 4;
      const share = mixed[from + 3];
      if (share <= 0) continue;
      image.data[base + from] = mixed[from] / share;
      image.data[base + from + 1] = mixed[from + 1] / share;
      image.data[base + from + 2] = mixed[from + 2] / share;
      image.data[base + from + 3] = Math.min(share, 1) * 255;
    }
  }
  pen.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  for (let device = 0; device < timeline.devices; device++) {
    const top = geometry.top(device);
    context.drawImage(line, 0, device, columns, 1, 0, top, columns / ratio, geometry.rowInner);
  }
}

/** Add up the colors of a row's passes, weighted by their share of each column. */
function mixRow(timeline, device, time0, scale, columns, mixing, mixed) {
  const [low, high] = timeline.range(device, time0, time0 + columns / scale);
  const { start, end, kind, stage, chunkCount } = timeline;
  const chunks = timeline.meta.chunks;
  for (let at = low; at < high; at++) {
    const left = Math.max((start[at] - time0) * scale, 0);
    const right = Math.min((end[at] - time0) * scale, columns);
    const colour = 3 * (kind[at] * chunkCount + chunks[stage[at]]);
    const last = Math.min(Math.floor(right), columns - 1);
    for (let column = Math.floor(left); column <= last; column++) {
      const share = Math.min(right, column + 1) - Math.max(left, column);
      if (share <= 0) continue;
      const to = column * 4;
      mixed[to] += share * mixing[colour];
      mixed[to + 1] += share * mixing[colour + 1];
      mixed[to + 2] += share * mixing[colour + 2];
      mixed[to + 3] += share;
    }
  }
}

function paintHeld(context, timeline, geometry, time0, scale, width, skin) {
  const ratio = skin.ratio;
  const columns = Math.ceil(width * ratio) + 1;
  const most = new Float32Array(columns);
  const left = Math.max((timeline.first - time0) * scale, 0);
  const right = Math.min((timeline.last - time0) * scale, width);
  for (let device = 0; device < timeline.devices; device++) {
    most.fill(0);
    mostHeld(timeline, device, time0, scale * ratio, columns, most);
    const base = geometry.heldTop(device) + geometry.heldInner;
    context.fillStyle = skin.held;
    fillColumns(context, most, base, geometry.heldInner / geometry.heldMost, ratio);
    if (right > left) {
      context.fillStyle = skin.rule;
      context.fillRect(left, base, right - left, 0.75);
    }
  }
}

/** Write the maximum memory of a device in every column. */
function mostHeld(timeline, device, time0, scale, columns, most) {
  const [low, high] = timeline.range(device, time0, time0 + columns / scale);
  const begin = Math.max(low - 1, timeline.offsets[device]);
  const { start, end, held } = timeline;
  const stop = timeline.offsets[device + 1];
  for (let at = begin; at < high; at++) {
    raise(most, (start[at] - time0) * scale, (end[at] - time0) * scale, held[at], columns);
    if (at + 1 < stop && start[at + 1] > end[at]) {
      const next = (start[at + 1] - time0) * scale;
      raise(most, (end[at] - time0) * scale, next, timeline.heldAfter(at), columns);
    }
  }
}

function raise(most, left, right, value, columns) {
  const last = Math.min(Math.ceil(right), columns);
  for (let column = Math.max(Math.floor(left), 0); column < last; column++) {
    if (most[column] < value) most[column] = value;
  }
}

function fillColumns(context, most, base, height, ratio) {
  context.beginPath();
  context.moveTo(0, base);
  let before = 0;
  for (let column = 0; column < most.length; column++) {
    if (most[column] === before) continue;
    context.lineTo(column / ratio, base - before * height);
    before = most[column];
    context.lineTo(column / ratio, base - before * height);
  }
  context.lineTo(most.length / ratio, base - before * height);
  context.lineTo(most.length / ratio, base);
  context.fill();
}
