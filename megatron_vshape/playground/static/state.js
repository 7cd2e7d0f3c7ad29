// State of the page and its URL form: all inputs of a picture.

export const MOST_ENTRIES = 6;
const MOST_URL = 60_000; // characters; some programs truncate longer links

/** Return the initial state. */
export function firstState() {
  return {
    tab: "compare",
    devices: 8,
    microbatches: 24,
    cost: { forward: 1, backward: 1, weight: 1, send: 0 },
    unit: "",
    embedding: [0, 0, 0],
    head: [0, 0, 0],
    costsFile: null,
    gibPerChunk: null,
    entries: [{ source: "name", name: "v-half" }, { source: "name", name: "1f1b" }],
    active: 0,
    step: 0,
    follow: null,
    window: null,
    range: null,
    theme: "auto",
  };
}

/** Return the state as the fragment of a URL, including opened files. */
export async function writeState(state) {
  const given = new URLSearchParams();
  const loaded = [];
  const put = (key, value, usual) => {
    if (value !== null && String(value) !== String(usual)) given.set(key, value);
  };
  put("tab", state.tab, "timeline");
  put("d", state.devices, "");
  put("m", state.microbatches, "");
  const { forward, backward, weight, send } = state.cost;
  put("c", [forward, backward, weight, send].join(), "1,1,1,0");
  put("u", state.unit, "");
  put("e", state.embedding.join(), "0,0,0");
  put("h", state.head.join(), "0,0,0");
  put("costs", writeFile(state.costsFile, loaded), null);
  put("gib", state.gibPerChunk, null);
  put("s", state.entries.map((entry) => writeEntry(entry, loaded)).join("~"), "");
  put("a", state.active, 0);
  put("step", state.step, 0);
  put("f", state.follow, null);
  put("w", state.window?.join() ?? null, null);
  put("r", state.range?.join() ?? null, null);
  put("t", state.theme, "auto");
  return addFiles(given, loaded);
}

async function addFiles(given, loaded) {
  const packed = loaded.length ? await pack(JSON.stringify(loaded)) : "";
  const whole = packed.length <= MOST_URL;
  if (packed && whole) given.set("x", packed);
  const text = given.toString().replaceAll("%2C", ",").replaceAll("%7E", "~").replaceAll("%3A", ":");
  return { text, whole };
}

function writeFile(file, loaded) {
  if (file === null) return null;
  let place = loaded.findIndex((each) => each.name === file.name && each.text === file.text);
  if (place < 0) place = loaded.push({ name: file.name, text: file.text }) - 1;
  return `@${place}`;
}

function writeEntry(entry, loaded) {
  if (entry.source === "file") return writeFile(entry.file, loaded);
  if (entry.source === "plan") {
    const unit = entry.limit_in_gib ? "GiB" : "";
    return ["plan", `${entry.limit}${unit}`, entry.seconds ?? ""].join(":");
  }
  return entry.chunks ? `${entry.name}:c${entry.chunks}` : entry.name;
}

/** Parse the state from a URL; missing or invalid values get their defaults. */
export async function readState(text) {
  const state = firstState();
  const given = new URLSearchParams(text);
  const loaded = await unpackFiles(given.get("x"));
  const file = (value) => readFile(value, loaded);
  const number = (key, usual) => {
    const value = Number(given.get(key));
    return given.has(key) && Number.isFinite(value) ? value : usual;
  };
  if (text) state.tab = given.get("tab") ?? "timeline";
  state.devices = number("d", state.devices);
  state.microbatches = number("m", state.microbatches);
  const cost = numbers(given.get("c"), 4);
  if (cost) [state.cost.forward, state.cost.backward, state.cost.weight, state.cost.send] = cost;
  state.unit = ["ms", "us"].includes(given.get("u")) ? given.get("u") : "";
  state.embedding = numbers(given.get("e"), 3) ?? state.embedding;
  state.head = numbers(given.get("h"), 3) ?? state.head;
  state.costsFile = file(given.get("costs"));
  state.gibPerChunk = number("gib", null);
  const entries = (given.get("s") ?? "").split("~").map((each) => readEntry(each, loaded));
  const good = entries.filter((each) => each !== null).slice(0, MOST_ENTRIES);
  if (good.length) state.entries = good;
  state.active = Math.min(Math.max(Math.trunc(number("a", 0)), 0), state.entries.length - 1);
  state.step = Math.min(Math.max(Math.trunc(number("step", 0)), 0), 4);
  state.follow = number("f", null);
  state.window = stretch(given.get("w"));
  state.range = stretch(given.get("r"));
  state.theme = ["light", "dark"].includes(given.get("t")) ? given.get("t") : "auto";
  return state;
}

function stretch(text) {
  const found = numbers(text, 2);
  return found && found[0] < found[1] ? found : null;
}

function numbers(text, count) {
  const found = (text ?? "").split(",").map(Number);
  const good = text && found.length >= count && found.every(Number.isFinite);
  return good ? found.slice(0, count) : null;
}

function readFile(text, loaded) {
  return text?.startsWith("@") ? (loaded[Number(text.slice(1))] ?? null) : null;
}

function readEntry(text, loaded) {
  if (text.startsWith("@")) {
    const file = readFile(text, loaded);
    return file && { source: "file", file };
  }
  const [name, ...rest] = text.split(":");
  if (!name) return null;
  if (name === "plan") return readPlan(rest);
  const entry = { source: "name", name };
  for (const option of rest) {
    if (/^c?\d+$/.test(option)) entry.chunks = Number(option.replace("c", "")); // :4 as on the command line
  }
  return entry;
}

function readPlan([limit = "", seconds = ""]) {
  const value = Number(limit.replace(/GiB$/, ""));
  if (!Number.isFinite(value)) return null;
  return {
    source: "plan",
    limit: value,
    limit_in_gib: limit.endsWith("GiB"),
    seconds: seconds === "" || !Number.isFinite(Number(seconds)) ? null : Number(seconds),
  };
}

async function pack(text) {
  const bytes = await through(new TextEncoder().encode(text), new CompressionStream("deflate-raw"));
  let letters = "";
  for (const byte of bytes) letters += String.fromCharCode(byte);
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function unpackFiles(text) {
  if (!text) return [];
  try {
    const letters = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    const whole = await through(bytes, new DecompressionStream("deflate-raw"));
    const files = JSON.parse(new TextDecoder().decode(whole));
    const good = (file) => typeof file?.name === "string" && typeof file?.text === "string";
    return Array.isArray(files) ? files.map((file) => (good(file) ? file : null)) : [];
  } catch {
    return [];
  }
}

/** Return bytes after compression or decompression by a stream. */
export async function through(bytes, stream) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}
