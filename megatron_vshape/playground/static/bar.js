// Tool bar above the pictures: zoom, followed microbatch, legend.

import { element } from "./dom.js";

// Legend entries by pass kind; a full backward is drawn as its two halves.
const LEGEND = [
  { of: [0], parts: [0], name: "forward" },
  { of: [1], parts: [1], name: "input gradient" },
  { of: [2], parts: [2], name: "weight gradient" },
  { of: [3], parts: [1, 2], name: "full backward" },
];

/** Return the elements of the tool bar. */
export function barParts({ state, view, chunkCount, kinds, palette, seek, change }) {
  const button = (id, text, title, act, pressed) =>
    element("button", { type: "button", class: "button", id, title, "aria-label": text.length < 4 ? title : null, "aria-pressed": pressed, click: act }, text);
  const parts = [
    element(
      "span",
      { class: "group" },
      button("earlier", "‹", "Earlier", () => view.pan(-view.span * 0.25)),
      button("zoom-out", "−", "Zoom out", () => view.zoom(1 / 1.6)),
      button("zoom-all", "All", "Show all of it", () => view.fit()),
      button("zoom-in", "+", "Zoom in", () => view.zoom(1.6)),
      button("later", "›", "Later", () => view.pan(view.span * 0.25)),
    ),
  ];
  if (state.follow !== null) {
    parts.push(button("let-go", `Following microbatch ${state.follow}  ×`, "Stop following", () => change({ follow: null }), "true"));
  }
  if (state.range !== null) {
    parts.push(button("no-range", "Measured range  ×", "Remove the measured range", () => change({ range: null }), "true"));
  }
  parts.push(...finder(seek), legend(chunkCount, kinds, palette));
  return parts;
}

let sought = ""; // last search text, because the bar is rebuilt meanwhile

function finder(seek) {
  const missed = element("span", { id: "missed", role: "status", "aria-live": "polite" });
  const find = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    const there = seek(event.target.value);
    event.target.setAttribute("aria-invalid", String(!there));
    missed.textContent = there ? "" : `There is no pass ${event.target.value}: a kind, a stage, a dot and a microbatch, as F3.12.`;
  };
  const keep = (event) => {
    sought = event.target.value;
    event.target.removeAttribute("aria-invalid");
    missed.textContent = "";
  };
  const field = element("input", {
    type: "search",
    id: "find",
    value: sought,
    placeholder: "Find F3.12",
    "aria-label": "Find a pass by its name, as F3.12, with Enter",
    spellcheck: "false",
    "aria-describedby": "missed",
    input: keep,
    keydown: find,
  });
  return [field, missed];
}

function legend(chunkCount, kinds, palette) {
  const fills = palette.fills[Math.min(chunkCount, palette.fills.length) - 1];
  const swatch = (rows) =>
    element(
      "svg",
      { width: 10 * rows[0].length, height: 12, "aria-hidden": "true" },
      ...rows.flatMap((colours, row) => colours.map((fill, at) => {
        const height = 12 / rows.length;
        return element("rect", { x: 10 * at, y: row * height, width: 10, height, fill });
      })),
    );
  const entries = LEGEND.filter(({ of }) => of.some((kind) => kinds.has(kind))).map(({ parts, name }) =>
    element("span", {}, swatch(parts.map((part) => fills[part])), name));
  const note = chunkCount > 1 ? [element("span", {}, `swatches: chunk 0 left, chunk ${chunkCount - 1} right`)] : [];
  return element("span", { class: "legend" }, ...entries, element("span", {}, element("i", { class: "hatched" }), "bubble"), ...note);
}
