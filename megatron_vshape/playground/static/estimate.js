// Estimate of a pasted training command: memory of every rank, verdict and remedies.

import { Refusal, makeEstimate } from "./api.js";
import { withProgress } from "./asking.js";
import { byId, decimal, element, refill } from "./dom.js";
import { numberCard, table } from "./numbers.js";
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
const OUTSIDE = { cached: "Reserved, not allocated", outside: "CUDA and NCCL", spare: "Spare" };

// Not in the address: a command can be long and private.
const entered = { command: "", gpu: "h100", number: "", vocabulary: "" };
const last = { isRequested: false, answer: null };

/** Show the form and the last estimate; request a new one after the button was pressed. */
export async function showEstimate(signal) {
  clearPictures();
  refill(byId("lead"), form(app.offers));
  if (last.isRequested) {
    Object.assign(last, { isRequested: false, answer: null });
    const count = (text) => (text.trim() ? Number(text) : null);
    const request = { ...entered, number: count(entered.number), vocabulary: count(entered.vocabulary) };
    try {
      last.answer = await withProgress((onProgress) => makeEstimate(request, { signal, onProgress }));
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      byId(`estimate-${error.field}`)?.setAttribute("aria-invalid", "true");
      return error;
    }
  }
  if (last.answer && !signal.aborted) showAnswer(last.answer);
  return null;
}

function form({ gpus, example }) {
  const request = (event) => {
    event.preventDefault();
    last.isRequested = true;
    showAgain();
  };
  const tryExample = (event) => {
    Object.assign(entered, example);
    request(event);
  };
  const submit = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && request(event);
  const field = (tag, name, title, attributes, ...children) => {
    const keep = (event) => {
      entered[name] = event.target.value;
    };
    const input = element(tag, { id: `estimate-${name}`, input: keep, ...attributes }, ...children);
    input.value = entered[name];
    return element("label", { class: "field" }, element("span", {}, title), input);
  };
  const options = Object.entries(gpus).map(([name, bytes]) =>
    element("option", { value: name }, `${name.toUpperCase()}, ${gib(bytes)} GiB`),
  );
  const count = { type: "text", inputmode: "numeric", placeholder: "from the command" };
  const text = { rows: 7, spellcheck: "false", required: true, keydown: submit };
  text.placeholder = "torchrun ... pretrain_gpt.py --num-layers 32 --hidden-size 4096 --pipeline-model-parallel-size 4 ...";
  return element(
    "form",
    { id: "estimate", submit: request, autocomplete: "off" },
    field("textarea", "command", "Training command with its flags", text),
    element(
      "div",
      { class: "row" },
      field("select", "gpu", "GPU", {}, ...options),
      field("input", "number", "Number of GPUs", count),
      field("input", "vocabulary", "Vocabulary size", count),
      element("button", { type: "submit", class: "button main", id: "estimate-run" }, "Estimate"),
      element("button", { type: "button", class: "button", id: "estimate-example", click: tryExample }, "Try Llama 3 8B"),
    ),
  );
}

function showAnswer(answer) {
  const { ranks, gpu_memory_bytes: memory } = answer;
  const largest = ranks.reduce((a, b) => (b.peak_bytes > a.peak_bytes ? b : a));
  const tightest = ranks.reduce((a, b) => (b.spare_bytes < a.spare_bytes ? b : a));
  byId("numbers").replaceChildren(
    numberCard("Step time", `${decimal(answer.step_s, 2)} s`, answer.step_estimate),
    numberCard("Largest peak", `${gib(largest.peak_bytes)} GiB`, `allocated; rank ${largest.rank}`),
    numberCard("Spare", `${gib(tightest.spare_bytes)} GiB`, `of ${gib(memory)} GiB; rank ${tightest.rank}`),
  );
  const head = ["Rank", ...Object.values(PARTS), "Peak", "Reserved", "Spare"];
  const rows = ranks.map((rank) => {
    const sizes = [...Object.keys(PARTS).map((name) => rank.parts[name]), rank.peak_bytes, rank.reserved_bytes, rank.spare_bytes];
    return [String(rank.rank), ...sizes.map((bytes) => element("td", {}, gib(bytes)))];
  });
  byId("pictures").replaceChildren(
    element(
      "figure",
      {},
      element("p", { id: "verdict" }, answer.verdict),
      ...[...answer.remedies, `${answer.run}.`].map((text) => element("p", { class: "remedy" }, text)),
      ...bars(ranks, memory, answer.gpu.toUpperCase()),
      table(head, rows, "Memory by rank, GiB"),
    ),
  );
}

/** Draw a bar per rank, with a line at the memory of the GPU, and the legend. */
function bars(ranks, memory, gpu) {
  const whole = Math.max(...ranks.map((rank) => Math.max(memory, memory - rank.spare_bytes)));
  const bar = (rank) => {
    const outside = memory - rank.reserved_bytes - rank.spare_bytes;
    const sizes = { ...rank.parts, cached: rank.reserved_bytes - rank.peak_bytes, outside, spare: rank.spare_bytes };
    let end = 0;
    const boxes = Object.entries({ ...PARTS, ...OUTSIDE }).map(([name, title]) => {
      const width = Math.max(sizes[name], 0) / whole;
      end += width;
      const label = element("title", {}, `Rank ${rank.rank}: ${title} ${gib(sizes[name])} GiB`);
      return element("rect", { class: `part-${name}`, x: end - width, width, height: 1 }, label);
    });
    const limit = element("path", { class: "gpu-memory", d: `M${memory / whole} 0V1` });
    return element("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none" }, ...boxes, limit);
  };
  const rows = ranks.flatMap((rank) => [
    element("span", {}, `Rank ${rank.rank}`),
    bar(rank),
    element("span", {}, `${gib(rank.peak_bytes)} GiB`),
  ]);
  const swatch = (shape) => element("svg", { width: 11, height: 11, "aria-hidden": "true" }, shape);
  const items = Object.entries({ ...PARTS, ...OUTSIDE }).map(([name, title]) =>
    element("span", {}, swatch(element("rect", { class: `part-${name}`, width: 11, height: 11 })), title),
  );
  const limit = element("path", { class: "gpu-memory", d: "M5 0V11" });
  items.push(element("span", {}, swatch(limit), `${gib(memory)} GiB of the ${gpu}`));
  const about = "Memory by pipeline rank; the table below contains the numbers";
  return [
    element("div", { class: "bars", role: "img", "aria-label": about }, ...rows),
    element("div", { class: "legend" }, ...items),
  ];
}

function gib(bytes) {
  return decimal(bytes / GIB, 1);
}
