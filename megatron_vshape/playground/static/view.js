// View: the visible time range, shared by all pictures on one axis.

const CLOSEST = 4; // passes of typical length across the picture at maximum zoom
const MOST_AT_ONCE = 1000; // passes across the picture; with more, only a color pattern is visible
const READABLE = 200;

export class View {
  constructor(onChange) {
    this.onChange = onChange;
    this.listeners = new Set();
    this.anchor = null; // default center of a zoom
    this.setBounds(0, 1, 1);
  }

  /** Set the complete time range, and the length of a typical pass. */
  setBounds(first, last, typical) {
    this.first = first;
    this.last = last > first ? last : first + 1;
    this.least = Math.min(CLOSEST * typical, this.last - this.first);
    const all = this.last - this.first;
    this.opening = all > MOST_AT_ONCE * typical ? READABLE * typical : all;
    this.start = this.first;
    this.span = this.opening;
  }

  /** Show the initial range: everything, or a readable part at the start. */
  open() {
    this.show(this.first, this.opening, false);
  }

  get opened() {
    return this.start === this.first && this.span === this.opening;
  }

  get end() {
    return this.start + this.span;
  }

  /** The selected pass if it is visible, otherwise the middle of the view. */
  get middle() {
    const seen = this.anchor !== null && this.anchor >= this.start && this.anchor <= this.end;
    return seen ? this.anchor : this.start + this.span / 2;
  }

  get whole() {
    return this.span >= (this.last - this.first) * 0.999999;
  }

  /** Show the time from `start` on; a pan keeps `span` bitwise equal. */
  show(start, span = this.span, told = true) {
    this.span = Math.min(Math.max(span, this.least), this.last - this.first);
    this.start = Math.min(Math.max(start, this.first), this.last - this.span);
    this.redraw();
    if (told) this.onChange?.();
  }

  pan(time) {
    this.show(this.start + time);
  }

  /** Zoom by `factor`, with `time` fixed. */
  zoom(factor, time = this.middle) {
    const span = Math.min(Math.max(this.span / factor, this.least), this.last - this.first);
    this.show(time - ((time - this.start) * span) / this.span, span);
  }

  fit() {
    this.show(this.first, this.last - this.first);
  }

  /** Scroll to a time range, with some margin. */
  reveal(t0, t1) {
    if (t0 >= this.start && t1 <= this.end) return;
    const span = Math.max(this.span, (t1 - t0) * 1.2);
    this.show((t0 + t1) / 2 - span / 2, span);
  }

  redraw() {
    for (const listener of this.listeners) listener();
  }
}
