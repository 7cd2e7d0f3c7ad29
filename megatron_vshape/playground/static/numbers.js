// Key figures next to a picture: of one schedule, or of several in a table.

import { KIND_NAMES } from "./model.js";
import { digits, element, percent } from "./dom.js";

/** Return the key figures of a timeline as terms and values. */
export function numberCards(timeline, units, gibPerChunk) {
  const { numbers, facts } = timeline.meta;
  const peak = Math.max(...numbers.peaks);
  const cards = [
    ["Bubble", percent(numbers.bubble), "of the makespan"],
    ["Span bubble", percent(numbers.span_bubble), "no barrier between steps"],
    ["Peak memory", `${units.held(peak)} ${units.heldName}`, peakNote(peak, facts, gibPerChunk)],
    ["Makespan", units.time(numbers.makespan), `${units.timeName}; busiest rank ${units.time(numbers.busy)}`],
    ["Communication", `${digits(numbers.relative_messages, 3)} ×`, `1F1B's; ${numbers.messages} messages per microbatch`],
  ];
  if (facts.lower_bound !== null) {
    const value = facts.bounded === "span" ? numbers.span : numbers.makespan;
    const gap = Math.max(value / facts.lower_bound - 1, 0);
    cards.push(["Lower bound", units.time(facts.lower_bound), `no ${facts.bounded} of this placement is below`]);
    cards.push(["Gap", percent(gap), "above the bound, at most"]);
  }
  return cards.map((card) => numberCard(...card));
}

/** Return a key figure with its note. */
export function numberCard(term, value, note) {
  return element("div", {}, element("dt", {}, term), element("dd", {}, value, element("small", {}, note)));
}

/** Return a table of rows, each a heading and its cells. */
export function table(head, rows, label) {
  const heading = element("tr", {}, ...head.map((title) => element("th", { scope: "col" }, title)));
  const body = rows.map(([title, ...cells]) => element("tr", {}, element("th", { scope: "row" }, title), ...cells));
  const whole = element("table", { class: "facts" }, element("thead", {}, heading), element("tbody", {}, ...body));
  return element("div", { class: "wide", tabindex: "0", role: "group", "aria-label": label }, whole);
}

/** Format the length of a time range, and the work of the ranks in it. */
export function rangeText(timeline, [from, to], units) {
  const time = (value) => units.time(value - timeline.first);
  const work = timeline.workBetween(from, to);
  const all = timeline.devices * (to - from);
  const parts = KIND_NAMES.map((name, kind) => [name, work[kind] / all]).filter(([, share]) => share > 0);
  const idle = 1 - work.reduce((sum, each) => sum + each, 0) / all;
  const shares = [["idle", Math.max(idle, 0)], ...parts].map(([name, share]) => `${name} ${percent(share)}`);
  const length = `${units.time(to - from)} ${units.timeName}`;
  return `${length}, from ${time(from)} to ${time(to)}. Of the ranks' time: ${shares.join(", ")}.`;
}

function peakNote(peak, facts, gibPerChunk) {
  const parts = [];
  if (!facts.in_bytes && gibPerChunk) parts.push(`${digits(peak * gibPerChunk, 4)} GiB`);
  if (facts.base_peak) parts.push(`${percent(peak / facts.base_peak)} of 1F1B's`);
  if (facts.limit !== null) parts.push(`within its limit`);
  return parts.join(", ");
}

/** Return a table with a row per timeline; the best of a column is marked. */
export function factsTable(timelines, units, gibPerChunk) {
  const rows = timelines.map((timeline) => {
    const { numbers, facts } = timeline.meta;
    const peak = Math.max(...numbers.peaks);
    return { timeline, numbers, facts, peak };
  });
  const inGib = gibPerChunk && !rows[0].facts.in_bytes;
  const columns = [
    [`Peak, ${units.heldName}`, ({ peak }) => peak, units.held],
    ...(inGib ? [["GiB", ({ peak }) => peak * gibPerChunk, (value) => digits(value)]] : []),
    ...(rows.some(({ facts }) => facts.base_peak) ? [["of 1F1B's", relative, share]] : []),
    ["Bubble", ({ numbers }) => numbers.bubble, percent],
    ["Span bubble", ({ numbers }) => numbers.span_bubble, percent],
    [`Makespan, ${units.timeName}`, ({ numbers }) => numbers.makespan, units.time],
    ["Messages", ({ numbers }) => numbers.relative_messages, (value) => `${digits(value, 3)} ×`],
  ];
  const body = rows.map((row) => [
    row.timeline.meta.title,
    ...columns.map(([, value, write]) => {
      const least = Math.min(...rows.map(value).filter(Number.isFinite));
      const best = rows.length > 1 && value(row) <= least * (1 + 1e-9) + 1e-12;
      return element("td", { class: best ? "best" : null }, write(value(row)));
    }),
  ]);
  return table(["Schedule", ...columns.map(([title]) => title)], body, "Numbers");
}

function relative({ peak, facts }) {
  return facts.base_peak ? peak / facts.base_peak : NaN;
}

function share(value) {
  return Number.isFinite(value) ? percent(value) : "–";
}
