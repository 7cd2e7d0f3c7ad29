// Elements and numbers: what every other module uses to write on the page.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set("svg g path rect circle line text title".split(" "));

/** Return a new element; attributes that are functions become listeners. */
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

/** Replace what is in an element; the focus stays where it was, told by its id, or close to it. */
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

const formats = new Map(); // making one takes longer than a frame has

function formatFor(key, options) {
  if (!formats.has(key)) formats.set(key, new Intl.NumberFormat("en", options));
  return formats.get(key);
}

/** Return a number with so many significant digits, thousands apart. */
export function digits(value, significant = 4) {
  if (!Number.isFinite(value)) return "–";
  return formatFor(significant, { maximumSignificantDigits: significant }).format(value);
}

/** Return a number with so many decimals, thousands apart. */
export function decimal(value, decimals) {
  const options = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return formatFor(`.${decimals}`, options).format(value);
}

/** Return a share as per cent with one decimal; what rounds to nothing is nothing. */
export function percent(share) {
  return `${(100 * share).toFixed(1).replace("-0.0", "0.0")} %`;
}

/** Return a function that runs `act` once it has not been called for so many milliseconds. */
export function debounced(act, milliseconds) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), milliseconds);
  };
}

/** Let the reader save a text or blob as a file. */
export function saveFile(name, content, type = "text/plain") {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const url = URL.createObjectURL(blob);
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
