// Single-file page: the server's answers are embedded in compressed form.

import { readPayload } from "./model.js";
import { through } from "./state.js";

/** Return the embedded data, or null if there is a server. */
export async function embeddedPage() {
  const holder = document.getElementById("embedded");
  if (holder === null) return null;
  const data = JSON.parse(holder.textContent);
  const answers = new Map();
  for (const [want, packed] of Object.entries(data.answers)) {
    answers.set(want, readPayload((await unpacked(packed)).buffer));
  }
  return {
    offers: data.offers,
    state: data.state,
    answer: (want) => answers.get(want),
    hasText: (want) => want in data.texts,
    text: async (want) => new TextDecoder().decode(await unpacked(data.texts[want])),
  };
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return through(bytes, new DecompressionStream("deflate"));
}
