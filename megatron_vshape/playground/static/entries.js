// Tabs, compared schedules, and files opened by the user.

import { byId, element, refill } from "./dom.js";
import { fileCosts } from "./form.js";
import { app, change, showAgain } from "./page.js";
import { MOST_ENTRIES } from "./state.js";

/** Load the user's files; their keys identify schedules and costs. */
export async function openFiles(files) {
  const wrong = [];
  for (const file of files) {
    const opened = { name: file.name, text: await file.text() };
    const sort = sortOf(opened);
    if (sort === "costs") change(fileCosts(app.state, opened));
    else if (sort === "schedule") addEntry({ source: "file", file: opened });
    else wrong.push(file.name);
  }
  if (!wrong.length) return;
  app.complaint = `${wrong.join(", ")}: not a schedule or costs file.`;
  showAgain();
}

function sortOf({ name, text }) {
  if (name.endsWith(".csv")) return "schedule";
  try {
    const data = JSON.parse(text);
    if (data.forward_us) return "costs";
    return data.order ? "schedule" : null;
  } catch {
    return null;
  }
}

function addEntry(entry) {
  const { entries, active } = app.state;
  const at = entries.length < MOST_ENTRIES ? entries.length : active;
  change({ entries: entries.toSpliced(at, 1, entry), active: at });
}

/** Draw the tabs. */
export function drawTabs() {
  const { tabs } = app.offers;
  const buttons = tabs.map(({ name, title }) => {
    const selected = app.state.tab === name;
    const open = () => change({ tab: name, follow: null, window: null, range: null, ...exampleOf(name) });
    const act = { click: open, keydown: stepTabs };
    return element(
      "button",
      { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "stage", "aria-selected": String(selected), tabindex: selected ? 0 : -1, ...act },
      title,
    );
  });
  refill(byId("tabs"), ...(buttons.length > 1 ? buttons : []));
  byId("about").textContent = tabs.find(({ name }) => name === app.state.tab).about;
}

/** Return the default schedules to compare with. */
function exampleOf(tab) {
  const { entries } = app.state;
  return tab === "compare" && entries.length === 1 ? { entries: [...entries, nextEntry()] } : {};
}

function stepTabs(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const tabs = [...byId("tabs").children];
  const next = tabs[(tabs.indexOf(event.target) + by + tabs.length) % tabs.length];
  next.focus();
  next.click();
}

/** Return the title of an entry before its schedule is made. */
export function entryTitle(entry) {
  if (entry.source === "plan") {
    return `Plan ≤ ${entry.limit} ${entry.limit_in_gib ? "GiB" : "chunks"}`;
  }
  if (entry.source === "file") return entry.file.name;
  const title = app.offers.schedules.find(({ name }) => name === entry.name)?.title ?? entry.name;
  return entry.chunks ? `${title}:${entry.chunks}` : title;
}

/** Draw the compared schedules. */
export function drawEntries() {
  const { state } = app;
  if (app.embedded || state.tab === "estimate") return refill(byId("entries"));
  const chips = state.entries.map((entry, at) => {
    const title = entryTitle(entry);
    const parts = [element("button", { type: "button", id: `entry-${at}`, "aria-pressed": String(at === state.active), click: () => change({ active: at, window: null, range: null }) }, title)];
    if (state.entries.length > 1) {
      parts.push(element("button", { type: "button", id: `remove-${at}`, "aria-label": `Remove ${title}`, click: () => removeEntry(at) }, "×"));
    }
    return element("span", { class: "entry", "data-active": String(at === state.active) }, ...parts);
  });
  const more = element("button", { type: "button", id: "add-entry", class: "plain", click: () => addEntry(nextEntry()) }, "+ Add to compare");
  refill(byId("entries"), ...chips, ...(chips.length < MOST_ENTRIES ? [more] : []));
}

function nextEntry() {
  const taken = new Set(app.state.entries.map(({ name }) => name));
  const published = app.offers.schedules.filter(({ planned }) => !planned).map(({ name }) => name);
  const liked = ["1f1b", "v-min", "v-half", "v-zb", "zb-h1", ...published];
  return { source: "name", name: liked.find((name) => !taken.has(name)) };
}

function removeEntry(at) {
  const entries = app.state.entries.toSpliced(at, 1);
  const active = app.state.active - (at < app.state.active);
  change({ entries, active: Math.min(active, entries.length - 1) });
}
