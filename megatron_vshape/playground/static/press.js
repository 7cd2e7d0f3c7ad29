// What waits for the end of a click: it is lost if what was pressed is replaced before the release.

let pressed = false;
let waiting = null;

/** Run `act` in a task of its own once no button is held down; of several, the last given. */
export function afterPress(act) {
  waiting = act;
  setTimeout(runWaiting);
}

function runWaiting() {
  if (pressed) return;
  const act = waiting;
  waiting = null;
  act?.();
}

function endPress() {
  if (pressed) setTimeout(runWaiting); // the click comes first, in the same task as the release
  pressed = false;
}

addEventListener(
  "pointerdown",
  (event) => {
    pressed = event.button === 0 && !event.target.closest("select"); // its list takes the release
  },
  true,
);
addEventListener("pointermove", (event) => event.buttons || endPress(), true);
addEventListener("pointerup", endPress, true);
addEventListener("pointercancel", endPress, true);
