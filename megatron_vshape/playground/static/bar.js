// The tool bar over the pictures: zoom, the block's repeat, the followed microbatch, the legend.

import { element } from "./dom.js";

const KINDS_SHOWN = [[0, "forward"], [1, "input gradient"], [2, "weight gradient"]];

/** Return the tool bar's parts. */
export function barParts({ state, view, chunkCount, palette, hasPeriod, change }) {
  const button = (id, text, title, act, pressed) =>
    element("button", { type: "button", class: "button", id, title, "aria-label": title, "aria-pressed": pressed, click: act }, text);
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
  if (hasPeriod) {
    const on = state.block && state.follow === null; // a followed microbatch hides it
    parts.push(button("block", "Block's repeat", "Mark the building block's repeat", () =>
      change({ block: !on, follow: null }), String(on)));
  }
  if (state.follow !== null) {
    parts.push(button("let-go", `Following microbatch ${state.follow}  ×`, "Let it go", () => change({ follow: null }), "true"));
  }
  parts.push(legend(chunkCount, palette));
  return parts;
}

function legend(chunkCount, palette) {
  const fills = palette.fills[Math.min(chunkCount, palette.fills.length) - 1];
  const swatch = (colours) =>
    element(
      "svg",
      { width: 10 * colours.length, height: 11, "aria-hidden": "true" },
      ...colours.map((fill, at) => element("rect", { x: 10 * at, width: 10, height: 11, fill })),
    );
  const entries = KINDS_SHOWN.map(([kind, name]) =>
    element("span", {}, swatch(fills[kind]), name));
  const note = chunkCount > 1 ? [element("span", {}, `dark: chunk 0, light: chunk ${chunkCount - 1}`)] : [];
  return element("span", { class: "legend" }, ...entries, element("span", {}, element("i", { class: "hatched" }), "bubble"), ...note);
}
