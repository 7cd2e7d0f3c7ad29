// Timeline: passes of a schedule with their times, as typed arrays from the server.

const KINDS = ["F", "B", "W", "BW"];
export const KIND_NAMES = [
  "forward",
  "input gradient",
  "weight gradient",
  "full backward",
];
const ARRAYS = [
  ["start", Float64Array],
  ["end", Float64Array],
  ["held", Float32Array],
  ["microbatch", Uint32Array],
  ["stage", Uint16Array],
  ["kind", Uint8Array],
];

/** Decode the header and the timelines of an answer. */
export function readPayload(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let at = 4 + length;
  const timelines = header.timelines.map((meta) => {
    const size = meta.counts.reduce((sum, count) => sum + count, 0);
    const arrays = {};
    for (const [name, Type] of ARRAYS) {
      arrays[name] = new Type(buffer, at, size);
      at += 8 * Math.ceil((size * Type.BYTES_PER_ELEMENT) / 8);
    }
    return new Timeline(meta, arrays);
  });
  return { header, timelines };
}

export class Timeline {
  constructor(meta, arrays) {
    Object.assign(this, arrays);
    this.meta = meta;
    this.devices = meta.devices;
    this.size = arrays.start.length;
    this.chunkCount = Math.max(...meta.chunks) + 1;
    this.offsets = new Int32Array(this.devices + 1);
    meta.counts.forEach((count, device) => {
      this.offsets[device + 1] = this.offsets[device] + count;
    });
    this.measure();
    this.indexed = null;
  }

  /** Find the first start, the last end, the peak memory and the typical length of a pass. */
  measure() {
    let first = Infinity;
    let last = -Infinity;
    let highest = 0;
    for (let device = 0; device < this.devices; device++) {
      const [low, high] = [this.offsets[device], this.offsets[device + 1]];
      if (low === high) continue;
      first = Math.min(first, this.start[low]);
      last = Math.max(last, this.end[high - 1]);
    }
    this.kinds = new Set();
    for (let at = 0; at < this.size; at++) {
      if (this.held[at] > highest) highest = this.held[at];
      this.kinds.add(this.kind[at]);
    }
    this.first = first;
    this.last = last;
    this.highest = highest;
    const step = Math.max(1, Math.floor(this.size / 1000));
    const lengths = [];
    for (let at = 0; at < this.size; at += step) lengths.push(this.end[at] - this.start[at]);
    lengths.sort((a, b) => a - b);
    this.typical = lengths[Math.floor(lengths.length / 4)] || 1;
  }

  /** Return [low, high): the passes of a device that overlap the time from t0 to t1. */
  range(device, t0, t1) {
    const [low, high] = [this.offsets[device], this.offsets[device + 1]];
    const from = firstWhere(low, high, (at) => this.end[at] > t0);
    return [from, firstWhere(low, high, (at) => this.start[at] >= t1)];
  }

  /** Return the pass of a device at a time, or -1 if it is idle. */
  at(device, time) {
    const [low, high] = this.range(device, time, time);
    const found = Math.min(low, this.offsets[device + 1] - 1);
    if (found < this.offsets[device]) return -1;
    return this.start[found] <= time && time < this.end[found] && low <= high ? found : -1;
  }

  /** Return the pass of a device nearest to a time. */
  nearest(device, time) {
    const [low, high] = [this.offsets[device], this.offsets[device + 1]];
    if (low === high) return -1;
    const after = Math.min(firstWhere(low, high, (at) => this.end[at] > time), high - 1);
    if (after > low && time - this.end[after - 1] < this.start[after] - time) return after - 1;
    return after;
  }

  /** Return the device that runs a pass. */
  deviceOf(at) {
    return this.meta.placement[this.stage[at]];
  }

  chunkOf(at) {
    return this.meta.chunks[this.stage[at]];
  }

  /** Return the text form of a pass, as in B3.12. */
  nameOf(at) {
    return `${KINDS[this.kind[at]]}${this.stage[at]}.${this.microbatch[at]}`;
  }

  /** Return the pass that includes this part (F, B or W) of a stage and microbatch, or -1. */
  find(part, stage, microbatch) {
    const { placement, microbatches } = this.meta;
    if (!(microbatch >= 0 && microbatch < microbatches)) return -1;
    if (this.indexed === null) this.makeIndex();
    return this.indexed[(part * placement.length + stage) * microbatches + microbatch];
  }

  makeIndex() {
    const [stages, microbatches] = [this.meta.placement.length, this.meta.microbatches];
    this.indexed = new Int32Array(3 * stages * microbatches).fill(-1);
    for (let at = 0; at < this.size; at++) {
      for (const part of this.meta.parts[this.kind[at]]) {
        const place = (part * stages + this.stage[at]) * microbatches + this.microbatch[at];
        this.indexed[place] = at;
      }
    }
  }

  /** Return the pass with this name, or the one that includes it; -1 if there is none. */
  named(text) {
    const found = /^(F|B|W|BW)(\d+)\.(\d+)$/.exec(text.trim().toUpperCase());
    if (!found) return -1;
    const [stage, microbatch] = [Number(found[2]), Number(found[3])];
    if (stage >= this.meta.placement.length) return -1;
    return this.find(this.meta.parts[KINDS.indexOf(found[1])][0], stage, microbatch);
  }

  /** Return the total time of each kind of pass between two times, summed over the devices. */
  workBetween(t0, t1) {
    const work = KINDS.map(() => 0);
    for (let device = 0; device < this.devices; device++) {
      const [low, high] = this.range(device, t0, t1);
      for (let at = low; at < high; at++) {
        work[this.kind[at]] += Math.min(this.end[at], t1) - Math.max(this.start[at], t0);
      }
    }
    return work;
  }

  /** Return the inputs of a pass: the producing passes, with their arrival times. */
  needsOf(at) {
    const part = this.meta.parts[this.kind[at]][0];
    const device = this.deviceOf(at);
    const found = [];
    for (const [other, stage] of this.meta.needs[part][this.stage[at]]) {
      const maker = this.find(other, stage, this.microbatch[at]);
      if (maker < 0) continue;
      const far = this.deviceOf(maker) !== device;
      found.push({ maker, far, ready: this.end[maker] + (far ? this.meta.send : 0) });
    }
    return found;
  }

  /** Return the last dependency of a pass: the pass before it on its device, or an input. */
  cause(at) {
    const low = this.offsets[this.deviceOf(at)];
    let best = null;
    if (at > low) best = { maker: at - 1, far: false, ready: this.end[at - 1], own: true };
    for (const need of this.needsOf(at)) {
      if (best === null || need.ready > best.ready) best = { ...need, own: false };
    }
    return best;
  }

  /** Return the passes of a microbatch: forwards in model order, then backwards, then the others. */
  passesOf(microbatch) {
    const stages = this.meta.placement.length;
    const found = [];
    for (let stage = 0; stage < stages; stage++) found.push(this.find(0, stage, microbatch));
    for (let stage = stages - 1; stage >= 0; stage--) found.push(this.find(1, stage, microbatch));
    const path = found.filter((at) => at >= 0);
    const rest = [];
    for (let stage = 0; stage < stages; stage++) {
      const at = this.find(2, stage, microbatch);
      if (at >= 0 && this.kind[at] === 2) rest.push(at);
    }
    return { path, rest };
  }

  /** Return the memory of a device between the end of a pass and the start of the next. */
  heldAfter(at) {
    const next = at + 1;
    if (next >= this.offsets[this.deviceOf(at) + 1]) return 0;
    const fresh = this.kind[next] === 0 ? this.meta.held_after_forward[this.stage[next]] : 0;
    return this.held[next] - fresh;
  }
}

/** Return the first index in [low, high) at which the monotonic condition is true. */
function firstWhere(low, high, holds) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}
