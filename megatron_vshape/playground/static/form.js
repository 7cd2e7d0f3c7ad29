// Controls for schedule, size and costs; each change updates the state.

import { element, refill } from "./dom.js";

const PLAN = "plan";
const EXTRAS = ["forward", "backward", "weight"];
const EXTRA_NAMES = ["F", "B", "W"];

/** Fill in the form from the state. `change(patch)` is called with the user's changes. */
export function fillForm(form, state, offers, change) {
  const open = form.querySelector("details")?.open ?? window.innerWidth > 860;
  const fold = element(
    "details",
    { class: "fold", open },
    element("summary", { id: "fold" }, "Schedule, size and costs"),
    scheduleFields(state, offers, change),
    sizeFields(state, change),
    costFields(state, offers, change),
    fileFields(change),
  );
  refill(form, fold);
}

/** Mark the invalid field and show the reason; return whether the field exists. */
export function markField(form, field, text) {
  const input = form.querySelector(`[data-field="${CSS.escape(field)}"]`);
  if (input === null) return false;
  const id = `wrong-${field}`;
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-describedby", id);
  const message = element("p", { class: "wrong", id, role: "alert" }, text.split("\n")[0]);
  (input.closest("table") ?? input.closest(".pair") ?? input.closest(".field")).after(message);
  const fold = input.closest("details");
  if (fold) fold.open = true;
  return true;
}

function scheduleFields(state, offers, change) {
  const entry = state.entries[state.active];
  const group = element("fieldset", {}, element("legend", {}, "Schedule"));
  const choose = (event) => change({ entries: replaced(state, chosenEntry(event, state, offers)) });
  const named = (isPlanned) =>
    offers.schedules.filter(({ planned }) => planned === isPlanned).map(({ name, title }) => [name, title]);
  const options = [
    optionGroup("Published", named(false)),
    optionGroup("Adaptive", [[PLAN, "Plan within a memory limit"], ...named(true)]),
    optionGroup("Files", scheduleFiles(state)),
  ];
  group.append(picker("schedule", "Order of the passes", options, entryKey(entry, state.active), choose));
  const edit = (patch) => change({ entries: replaced(state, { ...entry, ...patch }) });
  if (entry.source === PLAN) group.append(...planFields(entry, edit));
  const known = offers.schedules.find(({ name }) => name === entry.name);
  if (entry.source === "name" && known?.has_chunks) {
    group.append(input("chunks", "Stages per rank", entry.chunks, (chunks) => edit({ chunks }), "2"));
  }
  return group;
}

function optionGroup(label, pairs) {
  if (!pairs.length) return null;
  const options = pairs.map(([value, title]) => element("option", { value }, title));
  return element("optgroup", { label }, ...options);
}

function scheduleFiles(state) {
  return state.entries.flatMap((entry, at) => (entry.source === "file" ? [[`@${at}`, entry.file.name]] : []));
}

function entryKey(entry, at) {
  if (entry.source === PLAN) return PLAN;
  if (entry.source === "name") return entry.name;
  return `@${at}`;
}

function chosenEntry(event, state, offers) {
  const value = event.target.value;
  if (value.startsWith("@")) return state.entries[Number(value.slice(1))];
  if (value !== PLAN) return { source: "name", name: value };
  const inBytes = state.costsFile !== null;
  const devices = Number(state.devices) || 8;
  const limit = inBytes ? 40 : devices + 2;
  return { source: PLAN, limit, limit_in_gib: inBytes, seconds: null };
}

/** Return the entries with the active one replaced. */
function replaced(state, entry) {
  return state.entries.map((each, at) => (at === state.active ? entry : each));
}

function planFields(entry, edit) {
  const unit = entry.limit_in_gib ? "GiB" : "chunks";
  return [
    element(
      "div",
      { class: "pair" },
      input("limit", `Limit, ${unit}`, entry.limit, (limit) => edit({ limit })),
      input("seconds", "Seconds", entry.seconds, (seconds) => edit({ seconds }), "auto"),
    ),
    element("p", { class: "hint" }, entry.limit_in_gib
      ? "Activation memory of each rank."
      : "1F1B needs 2 × ranks chunks."),
  ];
}

function sizeFields(state, change) {
  return element(
    "fieldset",
    {},
    element("legend", {}, "Size"),
    element(
      "div",
      { class: "pair" },
      input("devices", "Ranks", state.devices, (devices) => change({ devices })),
      input("microbatches", "Microbatches", state.microbatches, (microbatches) =>
        change({ microbatches }),
      ),
    ),
  );
}

function costFields(state, offers, change) {
  const group = element("fieldset", {}, element("legend", {}, "Costs of a chunk"));
  const presets = offers.presets.map(({ key, title }) => [key, title]);
  const options = [
    optionGroup("Presets", presets),
    state.costsFile ? element("option", { value: "@" }, state.costsFile.name) : null,
    element("option", { value: "own" }, "My own"),
  ];
  const choose = (event) => change(chosenCosts(event.target.value, state, offers));
  group.append(picker("costs", "Preset", options, costsKey(state, offers), choose));
  if (state.costsFile === null) group.append(...ownCosts(state, change));
  return group;
}

function costsKey(state, offers) {
  if (state.costsFile !== null) return "@";
  const { forward, backward, weight, send } = state.cost;
  const extras = [...state.embedding, ...state.head].some((value) => value !== 0);
  const same = (preset) => preset.cost.join() === [forward, backward, weight, send].join();
  return (!extras && offers.presets.find(same)?.key) || "own";
}

function chosenCosts(value, state, offers) {
  const preset = offers.presets.find(({ key }) => key === value);
  if (!preset) return { ...chunkLimits(state), costsFile: null };
  const [forward, backward, weight, send] = preset.cost;
  return {
    ...chunkLimits(state),
    costsFile: null,
    cost: { forward, backward, weight, send },
    unit: preset.unit,
    embedding: [0, 0, 0],
    head: [0, 0, 0],
  };
}

/** Return the units with a costs file: times in microseconds, limits in GiB. */
export function fileCosts(state, file) {
  const entries = state.entries.map((entry) =>
    entry.source === PLAN && !entry.limit_in_gib
      ? { ...entry, limit: 40, limit_in_gib: true }
      : entry,
  );
  return { costsFile: file, entries };
}

function chunkLimits(state) {
  const limit = (Number(state.devices) || 8) + 2;
  const entries = state.entries.map((entry) =>
    entry.limit_in_gib ? { ...entry, limit, limit_in_gib: false } : entry,
  );
  return { entries };
}

function ownCosts(state, change) {
  const set = (name) => (value) => change({ cost: { ...state.cost, [name]: value } });
  const cell = (field, value, act, label) => element("td", {}, bare(field, value, act, label));
  const row = (title, field) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, title),
      ...EXTRAS.map((extra, at) =>
        cell(`${field}_${extra}`, state[field][at], (value) =>
          change({ [field]: state[field].with(at, value) }), `${title}, ${EXTRA_NAMES[at]}`),
      ),
    );
  const table = element(
    "table",
    { class: "costs" },
    element("thead", {}, element("tr", {}, element("td"), ...EXTRA_NAMES.map((name) =>
      element("th", { scope: "col" }, name)))),
    element(
      "tbody",
      {},
      element(
        "tr",
        {},
        element("th", { scope: "row" }, "Every chunk"),
        ...EXTRAS.map((name, at) =>
          cell(name, state.cost[name], set(name), `Every chunk, ${EXTRA_NAMES[at]}`)),
      ),
      row("+ Embedding", "embedding"),
      row("+ Head", "head"),
    ),
  );
  const gib = (gibPerChunk) => change({ gibPerChunk });
  const units = [["", "passes"], ["ms", "ms"], ["us", "µs"]];
  const options = units.map(([value, title]) => element("option", { value }, title));
  return [
    table,
    element(
      "div",
      { class: "pair" },
      input("send", "Communication", state.cost.send, set("send")),
      picker("unit", "Unit of time", options, state.unit, (event) =>
        change({ unit: event.target.value })),
    ),
    input("gib", "Activations of a chunk, GiB", state.gibPerChunk, gib, "not known"),
    element("p", { class: "hint" }, "A chunk is 1 / (2 × ranks) of the model, for any placement."),
  ];
}

function fileFields(change) {
  const load = (event) => change({ files: [...event.target.files] });
  const accept = ".json,.csv";
  const button = element("input", { type: "file", id: "file", "data-field": "file", accept, multiple: true, change: load });
  return element(
    "fieldset",
    {},
    element("legend", {}, "Open a file"),
    element("label", { class: "field" }, element("span", {}, "Schedule or costs"), button),
  );
}

function input(field, title, value, act, placeholder) {
  return element("label", { class: "field" }, element("span", {}, title), bare(field, value, act, null, placeholder));
}

function bare(field, value, act, label, placeholder) {
  const read = (event) => {
    const text = event.target.value.trim().replace(",", ".");
    act(text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text));
  };
  return element("input", {
    type: "text",
    inputmode: "decimal",
    id: `in-${field}`,
    "data-field": field,
    "aria-label": label,
    placeholder,
    value: value ?? "",
    change: read,
  });
}

function picker(field, title, options, value, act) {
  const select = element("select", { id: `in-${field}`, "data-field": field, change: act }, ...options.filter(Boolean));
  select.value = value;
  return element("label", { class: "field" }, element("span", {}, title), select);
}
