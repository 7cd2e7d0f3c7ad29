// Helpers for elements and numbers.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set("svg g path rect circle line text title".split(" "));

/** Create an element; function attributes become listeners. */
export function element(tag, attributes = {}, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return made;
}

/** Return the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Replace the content of an element, and keep the focus on the same or a nearby element. */
export function refill(host, ...children) {
  const before = document.activeElement;
  const inside = host.contains(before);
  host.replaceChildren(...children);
  if (!inside) return;
  const after = byId(before.id) ?? host.querySelector("button, input, select");
  after?.focus({ preventScroll: true });
  if (after?.id !== before.id || before.selectionStart == null) return;
  after.setSelectionRange(before.selectionStart, before.selectionEnd);
}

const formats = new Map(); // cached, because creating one takes longer than a frame

function formatFor(key, options) {
  if (!formats.has(key)) formats.set(key, new Intl.NumberFormat("en", options));
  return formats.get(key);
}

/** Format a number with `significant` digits and thousands separators. */
export function digits(value, significant = 4) {
  if (!Number.isFinite(value)) return "–";
  return formatFor(significant, { maximumSignificantDigits: significant }).format(value);
}

/** Format a number with a number of decimals and thousands separators. */
export function decimal(value, decimals) {
  const options = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return formatFor(`.${decimals}`, options).format(value);
}

/** Format a share as a percentage with one decimal, without a negative zero. */
export function percent(share) {
  return `${(100 * share).toFixed(1).replace("-0.0", "0.0")} %`;
}

/** Debounce: run `act` after no call for that number of milliseconds. */
export function debounced(act, milliseconds) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), milliseconds);
  };
}

/** Download a text or blob as a file. */
export function saveFile(name, content, type = "text/plain") {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const url = URL.createObjectURL(blob);
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
