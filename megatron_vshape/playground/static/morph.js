// Animated transition between steps: every pass moves from its old to its new position.

const LENGTH_MS = 900;

/** Return a timeline between two others; new passes start at their pass in the block. */
export function between(from, to) {
  const moving = Object.create(to);
  moving.start = new Float64Array(to.size);
  moving.end = new Float64Array(to.size);
  moving.range = (device) => [to.offsets[device], to.offsets[device + 1]];
  const origin = new Int32Array(to.size);
  for (let at = 0; at < to.size; at++) {
    const part = to.meta.parts[to.kind[at]][0];
    const microbatch = to.microbatch[at] % from.meta.microbatches;
    const found = from.find(part, to.stage[at], microbatch);
    origin[at] = found >= 0 ? found : from.find(part, to.stage[at], 0);
  }
  moving.move = (share) => {
    const eased = share < 0.5 ? 4 * share ** 3 : 1 - (2 - 2 * share) ** 3 / 2;
    for (let at = 0; at < to.size; at++) {
      const before = origin[at] < 0 ? to.start[at] : from.start[origin[at]];
      moving.start[at] = before + (to.start[at] - before) * eased;
      moving.end[at] = moving.start[at] + (to.end[at] - to.start[at]);
    }
  };
  return moving;
}

/** Animate a track from `from` to `to`; without animation if the user prefers reduced motion. */
export function playMorph(track, from, to, label) {
  const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (still || to.size > 30_000 || from === to) return track.show(to, label);
  const moving = between(from, to);
  const began = performance.now();
  track.morph = moving;
  const next = (now) => {
    if (track.morph !== moving) return;
    const share = Math.min(Math.max((now - began) / LENGTH_MS, 0), 1);
    if (share >= 1) {
      track.morph = null;
      return track.show(to, label);
    }
    moving.move(share);
    track.timeline = moving;
    track.tiles.clear();
    track.draw();
    requestAnimationFrame(next);
  };
  moving.move(0);
  track.show(moving, label);
  requestAnimationFrame(next);
}
