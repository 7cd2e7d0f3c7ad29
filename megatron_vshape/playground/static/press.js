// Defer changes to the end of a click: replacing a pressed element would lose the click.

let pressed = false;
let waiting = null;

/** Run `act` in a separate task once no button is pressed; a later call replaces it. */
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
    pressed = event.button === 0 && !event.target.closest("select"); // its list swallows the release
  },
  true,
);
addEventListener("pointermove", (event) => event.buttons || endPress(), true);
addEventListener("pointerup", endPress, true);
addEventListener("pointercancel", endPress, true);
