// Layout of a picture: rows of passes, rows of memory, axis. Lengths are CSS pixels.

export const MARGIN = { left: 34, right: 46, top: 24, axis: 26, between: 26 };

/** Return the positions of the rows; `high` is the height of all rows of passes. */
export function layOut(timeline, { high = 420, heldHigh = 300, withHeld = true, heldMost } = {}) {
  const { devices } = timeline;
  const row = Math.min(26, Math.max(6, Math.floor(high / devices)));
  const heldRow = withHeld ? Math.min(40, Math.max(7, Math.floor(heldHigh / devices))) : 0;
  const gap = row >= 14 ? 2 : 1;
  const heldFrom = MARGIN.top + devices * row + MARGIN.between;
  const bottom = withHeld ? heldFrom + devices * heldRow : MARGIN.top + devices * row;
  return {
    row,
    heldRow,
    rowInner: row - gap,
    heldInner: heldRow - (heldRow >= 14 ? 3 : 1),
    heldMost: (heldMost || timeline.highest || 1) * 1.04,
    heldFrom,
    bottom,
    height: bottom + MARGIN.axis,
    top: (device) => MARGIN.top + device * row,
    heldTop: (device) => heldFrom + device * heldRow,
    deviceAt: (y) => Math.floor((y - MARGIN.top) / row),
  };
}

/** Return the font size of a number in a box of this size in pixels; 0 if it does not fit. */
export function numberSize(text, wide, high) {
  const size = Math.min(11, Math.floor(high * 0.72), (wide - 1.5) / (text.length * 0.6));
  return size >= 6 ? size : 0;
}

/** Return round times for an axis, at least `room` pixels apart. */
export function ticksOf(start, span, width, room = 84) {
  const wanted = (span * room) / width;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted);
  const ticks = [];
  for (let at = Math.ceil(start / step - 1e-9); at * step <= start + span * (1 + 1e-9); at++) {
    ticks.push(at * step + 0); // -0 becomes 0
  }
  return { ticks, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}
