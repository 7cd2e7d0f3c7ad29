// View: which stretch of time is seen; shared by all pictures that stand on one axis.

const CLOSEST = 4; // passes of typical length across the picture at the highest zoom
const MOST_AT_ONCE = 1000; // passes across; of more, one sees a pattern of their colours alone
const READABLE = 200;

export class View {
  constructor(onChange) {
    this.onChange = onChange;
    this.listeners = new Set();
    this.anchor = null; // the time that a zoom from no other place keeps where it is
    this.setBounds(0, 1, 1);
  }

  /** Set the whole stretch of time, and the length of a typical pass. */
  setBounds(first, last, typical) {
    this.first = first;
    this.last = last > first ? last : first + 1;
    this.least = Math.min(CLOSEST * typical, this.last - this.first);
    const all = this.last - this.first;
    this.opening = all > MOST_AT_ONCE * typical ? READABLE * typical : all;
    this.start = this.first;
    this.span = this.opening;
  }

  /** Show what is seen before the reader has moved anything: all, or a beginning one can read. */
  open() {
    this.show(this.first, this.opening, false);
  }

  get opened() {
    return this.start === this.first && this.span === this.opening;
  }

  get end() {
    return this.start + this.span;
  }

  /** The chosen pass where it is in sight, else the middle of what is seen. */
  get middle() {
    const seen = this.anchor !== null && this.anchor >= this.start && this.anchor <= this.end;
    return seen ? this.anchor : this.start + this.span / 2;
  }

  get whole() {
    return this.span >= (this.last - this.first) * 0.999999;
  }

  /** Show the time from `start` on; a pan keeps `span` as it is to the last bit. */
  show(start, span = this.span, told = true) {
    this.span = Math.min(Math.max(span, this.least), this.last - this.first);
    this.start = Math.min(Math.max(start, this.first), this.last - this.span);
    this.redraw();
    if (told) this.onChange?.();
  }

  pan(time) {
    this.show(this.start + time);
  }

  /** Magnify by `factor` so that `time` stays where it is. */
  zoom(factor, time = this.middle) {
    const span = Math.min(Math.max(this.span / factor, this.least), this.last - this.first);
    this.show(time - ((time - this.start) * span) / this.span, span);
  }

  fit() {
    this.show(this.first, this.last - this.first);
  }

  /** Bring a stretch of time into sight, with some room around it. */
  reveal(t0, t1) {
    if (t0 >= this.start && t1 <= this.end) return;
    const span = Math.max(this.span, (t1 - t0) * 1.2);
    this.show((t0 + t1) / 2 - span / 2, span);
  }

  redraw() {
    for (const listener of this.listeners) listener();
  }
}
