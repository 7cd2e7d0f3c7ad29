// Export buttons below a picture, and the commands to make and train its schedule.

import { makeText } from "./api.js";
import { requestOf, showStatus } from "./asking.js";
import { byId, element, refill, saveFile } from "./dom.js";
import { app, writeUrl } from "./page.js";

/** Draw the export buttons, and the commands of the schedule. */
export function drawShare(timeline, entry) {
  const stem = fileStem();
  const made = (want, suffix) => {
    const request = requestOf(want, { schedule: entry }); // of the displayed schedule
    return () => saveMade(request, stem + suffix);
  };
  const button = (text, act, id) => element("button", { type: "button", class: "button", id, click: act }, text);
  const buttons = app.embedded ? [] : [button("Copy link", copyLink, "copy-link")];
  if (timeline && (!app.embedded || app.embedded.hasText("schedule-file"))) {
    buttons.push(button("Schedule JSON", made("schedule-file", ".json"), "save-json"));
  }
  if (timeline && (!app.embedded || app.embedded.hasText("trace-file"))) {
    buttons.push(button("Perfetto trace", made("trace-file", ".trace.json"), "save-trace"));
  }
  const commands = timeline ? commandsOf(timeline, stem) : [];
  refill(byId("share"), element("div", { class: "row" }, ...buttons), ...commands);
}

function commandsOf(timeline, stem) {
  const { facts, devices, microbatches } = timeline.meta;
  const name = facts.train || `${stem}.json`;
  const saved = facts.train ? "" : ` --export ${name}`; // training uses the file, which is verified
  const train = `--pipeline-schedule ${name} --pipeline-model-parallel-size ${devices} --micro-batch-size 1 --global-batch-size ${microbatches}`;
  const rows = [commandRow("train", "Train", train)];
  if (facts.recipe) rows.push(commandRow("recipe", "Make", `megatron-vshape ${facts.recipe}${saved}`));
  return rows;
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
    showStatus("The opened files are too large for the link: send them separately.");
  }
}

function fileStem() {
  const { title, devices, microbatches } = app.shown[0].timeline.meta;
  const plain = title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "");
  return `${plain || "schedule"}-d${devices}-m${microbatches}`;
}

async function saveMade(request, name) {
  try {
    const text = app.embedded ? await app.embedded.text(request.want) : await makeText(request);
    saveFile(name, text, "application/json");
  } catch (error) {
    showStatus(error.message, { wrong: true });
  }
}
