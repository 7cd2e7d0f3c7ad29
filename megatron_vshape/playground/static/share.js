// To take away: the buttons under a picture, and the commands that make and train it.

import { makeText } from "./api.js";
import { requestOf, showStatus } from "./asking.js";
import { byId, element, refill, saveFile } from "./dom.js";
import { pngOf, svgOf } from "./exports.js";
import { app, writeUrl } from "./page.js";

/** Draw the buttons that take the picture away, and the commands that make it again. */
export function drawShare(timeline, entry) {
  const button = (text, act, id) => element("button", { type: "button", class: "button", id, click: act }, text);
  const buttons = [button("SVG", saveSvg, "save-svg"), button("PNG", savePng, "save-png")];
  if (!app.embedded) buttons.unshift(button("Copy link", copyLink, "copy-link"));
  if (timeline && (!app.embedded || app.embedded.hasText("schedule-file"))) {
    buttons.push(button("Schedule JSON", () => saveMade(entry, "schedule-file", ".json"), "save-json"));
  }
  if (timeline && (!app.embedded || app.embedded.hasText("trace-file"))) {
    buttons.push(button("Perfetto trace", () => saveMade(entry, "trace-file", ".trace.json"), "save-trace"));
  }
  const commands = timeline ? commandsOf(timeline) : [];
  refill(byId("share"), element("div", { class: "row" }, ...buttons), ...commands);
}

function commandsOf(timeline) {
  const { facts, devices, microbatches } = timeline.meta;
  const name = facts.train || `${fileStem()}.json`;
  const saved = facts.train ? "" : ` --export ${name}`; // trained from the file, proved as it is
  const train = `--pipeline-schedule ${name} --pipeline-model-parallel-size ${devices} --micro-batch-size 1 --global-batch-size ${microbatches}`;
  return [
    commandRow("train", "Train", train),
    ...(facts.recipe ? [commandRow("recipe", "Make", `megatron-vshape ${facts.recipe}${saved}`)] : []),
  ];
}

function commandRow(id, title, text) {
  const copy = element("button", { type: "button", class: "button", id: `copy-${id}`, "aria-label": `Copy: ${title}`, click: (event) => copyText(text, event.target) }, "Copy");
  return element("div", { class: "command" }, element("span", {}, title), element("code", { id: `command-${id}`, tabindex: 0 }, text), copy);
}

async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it by hand";
  }
  setTimeout(() => (button.textContent = before), 1400);
}

async function copyLink(event) {
  await writeUrl();
  await copyText(location.href, event.target);
  if (!app.linkWhole) {
    showStatus("The link is without the files you opened: they are too large for it. Send them along.");
  }
}

function fileStem() {
  const title = app.shown[0]?.timeline.meta.title ?? "schedule";
  const plain = title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "");
  return `${plain || "schedule"}-d${app.state.devices}-m${app.state.microbatches}`;
}

function titlesShown() {
  return app.shown.map(({ timeline, title }) => title || timeline.meta.title);
}

function saveSvg() {
  saveFile(`${fileStem()}.svg`, svgOf(app.tracks, titlesShown()), "image/svg+xml");
}

async function savePng() {
  saveFile(`${fileStem()}.png`, await pngOf(app.tracks, titlesShown()));
}

async function saveMade(entry, want, suffix) {
  const request = requestOf(want, { schedule: entry });
  try {
    const text = app.embedded ? await app.embedded.text(want) : await makeText(request);
    saveFile(fileStem() + suffix, text, "application/json");
  } catch (error) {
    showStatus(error.message, { wrong: true });
  }
}
