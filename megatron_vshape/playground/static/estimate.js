// Estimate of a pasted training command: memory of every rank, verdict and remedies.

import { Refusal, makeEstimate } from "./api.js";
import { withProgress } from "./asking.js";
import { byId, decimal, element, refill } from "./dom.js";
import { app, showAgain } from "./page.js";
import { clearPictures } from "./pictures.js";

const GIB = 2 ** 30;
const PARTS = {
  weights: "Weights",
  gradients: "Gradients",
  optimizer: "Optimizer",
  activations: "Activations",
  logits: "Logits",
  rest: "Other",
};
const EXAMPLE = "torchrun ... pretrain_gpt.py --num-layers 32 --hidden-size 4096 --pipeline-model-parallel-size 4 ...";
const LEFT = 62; // of the bars, in units of the picture
const RIGHT = 760;
const ROW = 26;

// Not in the address: a command can be long and private.
const entered = { command: "", gpu: "h100", number: "", isRequested: false, answer: null };

/** Show the form and the last estimate; request a new one after the button was pressed. */
export async function showEstimate(signal) {
  const gpus = app.offers.gpus ?? {};
  clearPictures();
  if (!Object.keys(gpus).length) {
    const text = "Estimates need a playground of this machine: run megatron-vshape playground and open the printed address.";
    refill(byId("lead"), element("p", {}, text));
    return null;
  }
  refill(byId("lead"), form(gpus));
  if (entered.isRequested) {
    Object.assign(entered, { isRequested: false, answer: null });
    const { command, gpu, number } = entered;
    const request = { command, gpu, number: number.trim() ? Number(number) : null };
    try {
      entered.answer = await withProgress((onProgress) => makeEstimate(request, { signal, onProgress }));
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      byId(`estimate-${error.field}`)?.setAttribute("aria-invalid", "true");
      return error;
    }
  }
  if (entered.answer && !signal.aborted) showAnswer(entered.answer);
  return null;
}

function form(gpus) {
  const keep = (name) => (event) => {
    entered[name] = event.target.value;
  };
  const request = (event) => {
    event.preventDefault();
    entered.isRequested = true;
    showAgain();
  };
  const submit = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && request(event);
  const attributes = { id: "estimate-command", rows: 7, spellcheck: "false", required: true, placeholder: EXAMPLE };
  const text = element("textarea", { ...attributes, input: keep("command"), keydown: submit });
  text.value = entered.command;
  const options = Object.entries(gpus).map(([name, bytes]) =>
    element("option", { value: name, selected: name === entered.gpu }, `${name.toUpperCase()}, ${gib(bytes)} GiB`),
  );
  const number = element("input", { type: "text", id: "estimate-number", inputmode: "numeric", placeholder: "minimum", value: entered.number, input: keep("number") });
  return element(
    "form",
    { id: "estimate", submit: request, autocomplete: "off" },
    field("Training command with its flags", text),
    element(
      "div",
      { class: "row" },
      field("GPU", element("select", { id: "estimate-gpu", change: keep("gpu") }, ...options)),
      field("Number of GPUs", number),
      element("button", { type: "submit", class: "button main", id: "estimate-run" }, "Estimate"),
    ),
  );
}

function field(title, input) {
  return element("label", { class: "field" }, element("span", {}, title), input);
}

function showAnswer(answer) {
  const peaks = answer.ranks.map((rank) => rank.peak_bytes);
  const memory = answer.gpu_memory_bytes;
  byId("numbers").replaceChildren(
    card("Step time", `${decimal(answer.step_s, 2)} s`, answer.step_estimate),
    card("Largest peak", `${gib(Math.max(...peaks))} GiB`, `allocated; rank ${answer.ranks[peaks.indexOf(Math.max(...peaks))].rank}`),
    card("Free on that rank", `${gib(memory - Math.max(...peaks))} GiB`, `of ${gib(memory)} GiB, ${answer.gpu.toUpperCase()}`),
  );
  byId("pictures").replaceChildren(
    element(
      "figure",
      {},
      element("p", { id: "verdict" }, answer.verdict),
      ...answer.remedies.map((text) => element("p", { class: "remedy" }, text)),
      bars(answer.ranks, memory, answer.gpu),
      partLegend(),
      table(answer.ranks, memory),
    ),
  );
}

function card(term, value, note) {
  return element("div", {}, element("dt", {}, term), element("dd", {}, value, element("small", {}, note)));
}

/** Draw a bar per rank, with a line at the memory of the GPU. */
function bars(ranks, memory, gpu) {
  const most = Math.max(memory, ...ranks.map((rank) => rank.peak_bytes));
  const x = (bytes) => LEFT + (bytes / most) * (RIGHT - LEFT);
  const height = ranks.length * ROW + 24;
  const rows = ranks.flatMap(({ rank, parts, peak_bytes: peak }, at) => {
    const top = 20 + at * ROW;
    const box = (from, to, name, title) =>
      element("rect", { class: `part-${name}`, x: x(from), y: top, width: Math.max(x(to) - x(from), 0), height: ROW - 6 }, element("title", {}, title));
    let sum = 0;
    const boxes = Object.entries(PARTS).map(([name, title]) => {
      const from = sum;
      sum += parts[name];
      return box(from, sum, name, `Rank ${rank}: ${title} ${gib(parts[name])} GiB`);
    });
    if (peak < memory) boxes.push(box(peak, memory, "free", `Rank ${rank}: free ${gib(memory - peak)} GiB`));
    const text = element("text", { x: RIGHT + 10, y: top + 15 }, `${gib(peak)} GiB`);
    return [element("text", { x: 0, y: top + 15 }, `Rank ${rank}`), ...boxes, text];
  });
  const end = x(memory);
  const line = element("path", { class: "gpu-memory", d: `M${end} 16V${height}` });
  const label = element("text", { x: end, y: 11, "text-anchor": "end" }, `${gib(memory)} GiB of the ${gpu.toUpperCase()}`);
  const about = "Memory by pipeline rank; the table below contains the numbers";
  return element("svg", { class: "chart", viewBox: `0 0 840 ${height}`, role: "img", "aria-label": about }, ...rows, line, label);
}

function partLegend() {
  const swatch = (name) => element("svg", { width: 11, height: 11, "aria-hidden": "true" }, element("rect", { class: `part-${name}`, width: 11, height: 11 }));
  const items = Object.entries({ ...PARTS, free: "Free" });
  return element("div", { class: "legend" }, ...items.map(([name, title]) => element("span", {}, swatch(name), title)));
}

function table(ranks, memory) {
  const head = ["Rank", ...Object.values(PARTS), "Peak, GiB", "Free, GiB"];
  const rows = ranks.map(({ rank, parts, peak_bytes: peak }) => {
    const cells = [...Object.keys(PARTS).map((name) => parts[name]), peak, memory - peak];
    return element("tr", {}, element("th", { scope: "row" }, String(rank)), ...cells.map((bytes) => element("td", {}, gib(bytes))));
  });
  const heading = element("tr", {}, ...head.map((title) => element("th", { scope: "col" }, title)));
  const made = element("table", { class: "facts" }, element("thead", {}, heading), element("tbody", {}, ...rows));
  return element("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Memory by rank, GiB" }, made);
}

function gib(bytes) {
  return decimal(bytes / GIB, 1);
}
