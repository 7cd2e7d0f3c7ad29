// Tooltip of the pass under the pointer.

import { element } from "./dom.js";

const ROOM = 12;

/** Return functions to show and hide the tooltip. */
export function makeTip(box) {
  return {
    show(said, x, y, high) {
      box.replaceChildren(element("b", {}, said.name), ...said.lines.map((line) => element("p", {}, line)));
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      const left = Math.min(Math.max(x, ROOM), window.innerWidth - width - ROOM);
      const above = y - height - ROOM;
      const top = above > ROOM ? above : y + high + ROOM;
      box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    },
    hide() {
      box.hidden = true;
    },
  };
}
