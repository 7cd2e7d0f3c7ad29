// Requests to the server: its choices, and schedules on request with progress.

import { readPayload } from "./model.js";

const KEPT_BYTES = 192 * 2 ** 20; // cache of answers, for immediate navigation to earlier schedules
const BROKEN_OFF = "The answer broke off.";
const answered = new Map();

/** Invalid field of a request, with the server's message. */
export class Refusal extends Error {
  constructor(field, text) {
    super(text);
    this.field = field;
  }
}

/** Fetch the choices that the server offers. */
export async function loadOffers() {
  return readJson(await askServer("/api/offers"));
}

/** Fetch the answer to a request; `onProgress` receives intermediate results. */
export async function makeAnswer(request, { signal, onProgress } = {}) {
  const body = JSON.stringify(request);
  if (answered.has(body)) return keepAnswer(body, answered.get(body)).result;
  const answer = await askToMake(body, signal);
  const buffer = await readFrames(answer.body.getReader(), onProgress ?? (() => {}));
  const size = body.length + buffer.byteLength;
  return keepAnswer(body, { result: readPayload(buffer), size }).result;
}

/** Fetch a text made by the server: a schedule file or a trace. */
export async function makeText(request) {
  const answer = await askToMake(JSON.stringify(request));
  const buffer = await readFrames(answer.body.getReader(), () => {});
  return new TextDecoder().decode(buffer);
}

/** Fetch the estimate of a training command. */
export async function makeEstimate(request, { signal, onProgress }) {
  const answer = await askToMake(JSON.stringify(request), signal, "/api/estimate");
  const buffer = await readFrames(answer.body.getReader(), onProgress);
  return JSON.parse(new TextDecoder().decode(buffer));
}

function askToMake(body, signal, path = "/api/make") {
  const headers = { "content-type": "application/json" };
  return askServer(path, { method: "POST", headers, body, signal });
}

async function askServer(path, how) {
  const silent = "The server does not answer. Is it still running?";
  const answer = await arrived(fetch(path, how), silent);
  if (answer.ok) return answer;
  const { field, text } = await readJson(answer);
  throw new Refusal(field, text);
}

async function readJson(answer) {
  const text = await arrived(answer.text(), BROKEN_OFF);
  try {
    return JSON.parse(text);
  } catch {
    throw new Refusal("request", `The server answered ${answer.status}. Try again in a moment.`);
  }
}

/** Fetch a response; convert a failure, unless cancelled, to an error message. */
async function arrived(coming, words) {
  try {
    return await coming;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refusal("request", words);
  }
}

function keepAnswer(body, kept) {
  answered.delete(body);
  answered.set(body, kept);
  let size = 0;
  for (const [key, each] of [...answered].reverse()) {
    size += each.size;
    if (size > KEPT_BYTES) answered.delete(key);
  }
  return kept;
}

/** Read frames (a letter, a length, that number of bytes) up to the result; return its bytes. */
async function readFrames(reader, onProgress) {
  let held = new Uint8Array(0);
  for (;;) {
    const value = await nextPart(reader);
    held = held.length ? await gather(held, value, reader) : await gather(value, null, reader);
    while (held.length >= 5) {
      const length = frameLength(held);
      if (held.length < 5 + length) break;
      const [kind, frame] = [String.fromCharCode(held[0]), held.slice(5, 5 + length)];
      held = held.subarray(5 + length);
      if (kind === "R") return frame.buffer;
      const known = JSON.parse(new TextDecoder().decode(frame));
      if (kind === "E") throw new Refusal(known.field, known.text);
      onProgress(known);
    }
  }
}

async function nextPart(reader) {
  const { done, value } = await arrived(reader.read(), BROKEN_OFF);
  if (done) throw new Refusal("request", BROKEN_OFF);
  return value;
}

function frameLength(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset).getUint32(1, true);
}

/** Join the received parts; a large frame is read into one buffer of its size. */
async function gather(first, second, reader) {
  let held = second ? joined([first, second]) : first;
  if (held.length < 5) return held;
  const wanted = 5 + frameLength(held);
  if (held.length >= wanted) return held;
  const parts = [held];
  let size = held.length;
  while (size < wanted) {
    const value = await nextPart(reader);
    parts.push(value);
    size += value.length;
  }
  return joined(parts);
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
