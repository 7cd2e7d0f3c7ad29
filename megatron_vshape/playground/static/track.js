// Track: picture of one timeline on a canvas, drawn from cached tiles.

import { element } from "./dom.js";
import { MARGIN, layOut } from "./geometry.js";
import { describePass, drawChosen, drawFollowed, drawFrame, drawRange } from "./overlay.js";
import { coloursOf, isBoxed, makeHatch, mixingTable, paintTile } from "./paint.js";
import { listenTo } from "./pointer.js";

const TILE = 512; // CSS pixels; a multiple of the hatch's size, for seamless tiles
const MOST_TILES = 24;
const SOUGHT = 40; // visible passes around a pass that was searched by name

export class Track {
  /** `shared`: view, units, theme(), follow(), onFollow(microbatch), range(), onRange, tip. */
  constructor(host, shared) {
    this.shared = shared;
    this.layout = {};
    this.view = shared.view;
    this.timeline = null;
    this.chosen = -1;
    this.said = null; // description of the selected pass, while it is shown
    this.tiles = new Map();
    this.waiting = 0;
    this.canvas = element("canvas", { tabindex: 0, role: "application", class: "track" });
    this.told = element("p", { class: "unseen", "aria-live": "polite" });
    host.append(this.canvas, this.told);
    this.redraw = () => this.request();
    this.view.listeners.add(this.redraw);
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(host);
    listenTo(this);
  }

  /** Stop drawing, before the element is removed. */
  close() {
    this.view.listeners.delete(this.redraw);
    this.sizes.disconnect();
    cancelAnimationFrame(this.waiting);
  }

  get units() {
    return this.shared.unitsOf(this.timeline);
  }

  get plotWidth() {
    return Math.max(this.width - MARGIN.left - MARGIN.right, 1);
  }

  get scale() {
    return this.plotWidth / this.view.span;
  }

  /** Whether passes are wide enough for separate boxes. */
  get boxed() {
    return isBoxed(this.timeline, this.scale);
  }

  xOf(time) {
    return MARGIN.left + (time - this.view.start) * this.scale;
  }

  /** Return the time at a position of the canvas, limited to the visible timeline. */
  timeWithin(x) {
    const time = Math.min(Math.max(this.timeAt(x), this.view.start), this.view.end);
    return Math.min(Math.max(time, this.view.first), this.view.last);
  }

  timeAt(x) {
    return this.view.start + (x - MARGIN.left) / this.scale;
  }

  /** Show a timeline. */
  show(timeline, label) {
    this.timeline = timeline;
    this.chosen = -1;
    this.measuredFrom = null; // pass at which a range starts
    this.hideTip();
    this.canvas.setAttribute("aria-label", `${label}. Arrow keys move from pass to pass, Enter
      follows a microbatch, plus and minus zoom, 0 shows all, M measures from pass to pass, slash
      finds a pass by its name, Escape lets go.`);
    this.resize();
  }

  /** Fit the canvas to its parent, and drop tiles of another size. */
  resize() {
    if (this.timeline === null) return;
    const width = Math.floor(this.canvas.parentElement.clientWidth);
    if (!width) return;
    this.width = width;
    this.geometry = layOut(this.timeline, this.layout);
    this.ratio = Math.min(window.devicePixelRatio || 1, 2);
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(this.geometry.height * this.ratio);
    this.canvas.style.height = `${this.geometry.height}px`;
    this.dress();
  }

  /** Apply the colors of the theme, and repaint all tiles. */
  dress() {
    if (!this.geometry) return;
    const theme = this.shared.theme();
    const pen = this.canvas.getContext("2d");
    const colours = coloursOf(theme.palette, this.timeline.chunkCount);
    this.skin = {
      ...theme,
      colours,
      ratio: this.ratio,
      hatch: makeHatch(pen, theme.hatchLine, this.ratio),
      mixing: mixingTable(colours, this.timeline.chunkCount),
    };
    this.tiles.clear();
    this.draw();
  }

  /** Paint at another resolution and return the canvas; `resize` restores it. */
  picture(ratio) {
    this.ratio = ratio;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.geometry.height * ratio);
    this.dress();
    return this.canvas;
  }

  /** Draw before the next frame. */
  request() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.draw();
    });
  }

  draw() {
    if (!this.geometry) return;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.geometry.height);
    this.drawTiles(pen);
    const follow = this.shared.follow();
    const range = this.shared.range();
    if (follow !== null) drawFollowed(pen, this, follow);
    if (range !== null) drawRange(pen, this, range);
    if (this.chosen >= 0) drawChosen(pen, this, this.chosen);
    drawFrame(pen, this);
    if (this.said) this.placeTip();
  }

  drawTiles(pen) {
    if (this.paintedScale !== this.scale) this.tiles.clear();
    this.paintedScale = this.scale;
    const shift = (this.view.start - this.view.first) * this.scale;
    const first = Math.floor(shift / TILE);
    const last = Math.floor((shift + this.plotWidth) / TILE);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, 0, this.plotWidth, this.geometry.bottom + 1);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    for (let at = first; at <= last; at++) {
      const x = Math.round((MARGIN.left + at * TILE - shift) * this.ratio) / this.ratio;
      const tile = this.tile(at);
      pen.drawImage(tile, x, 0, tile.width / this.ratio, tile.height / this.ratio);
    }
    pen.restore();
    this.forgetFarTiles(first, last);
  }

  tile(at) {
    if (this.tiles.has(at)) return this.tiles.get(at);
    const tile = document.createElement("canvas");
    tile.width = Math.round(TILE * this.ratio);
    tile.height = Math.round((this.geometry.bottom + 1) * this.ratio);
    const pen = tile.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    const time0 = this.view.first + (at * TILE) / this.scale;
    paintTile(pen, this.timeline, this.geometry, time0, this.scale, TILE, this.skin);
    this.tiles.set(at, tile);
    return tile;
  }

  forgetFarTiles(first, last) {
    if (this.tiles.size <= MOST_TILES) return;
    const middle = (first + last) / 2;
    const far = [...this.tiles.keys()].sort((a, b) => Math.abs(b - middle) - Math.abs(a - middle));
    for (const at of far.slice(0, this.tiles.size - MOST_TILES)) this.tiles.delete(at);
  }

  /** Return the pass at a position of the canvas, or -1. */
  passAt(x, y) {
    const device = this.geometry.deviceAt(y);
    if (device < 0 || device >= this.timeline.devices || x < MARGIN.left) return -1;
    if (x > this.width - MARGIN.right) return -1;
    const time = this.timeAt(x);
    const exact = this.timeline.at(device, time);
    return exact >= 0 || this.boxed ? exact : this.timeline.nearest(device, time);
  }

  /** Select a pass; with `spoken` (by keyboard), read it out and scroll to it. */
  choose(at, spoken = false) {
    if (at === this.chosen && !spoken) return;
    this.chosen = at;
    const { start, end } = this.timeline;
    this.view.anchor = at < 0 ? null : (start[at] + end[at]) / 2;
    if (at < 0) this.hideTip();
    else this.tell(at, spoken);
    this.request();
  }

  /** Select a pass that was searched by name, and zoom in until it is visible. */
  seek(at) {
    const { start, end, typical } = this.timeline;
    const span = SOUGHT * typical;
    if (!this.boxed) this.view.show((start[at] + end[at] - span) / 2, span);
    this.choose(at, true);
  }

  tell(at, spoken) {
    const { timeline } = this;
    if (spoken) this.view.reveal(timeline.start[at], timeline.end[at]);
    this.said = describePass(timeline, at, this.units);
    if (spoken) this.told.textContent = `${this.said.name}: ${this.said.lines.join(", ")}`;
    this.placeTip();
  }

  /** Show the description of the selected pass next to its current position. */
  placeTip() {
    const { timeline, chosen, geometry } = this;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.min(Math.max(this.xOf(timeline.start[chosen]), MARGIN.left), this.width);
    const y = geometry.top(timeline.deviceOf(chosen));
    this.shared.tip.show(this.said, box.left + x, box.top + y, geometry.row);
  }

  /** Hide the description of the selected pass, which stays selected. */
  hideTip() {
    this.said = null;
    this.shared.tip.hide();
  }
}
