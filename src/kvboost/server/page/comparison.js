// The sends of one prompt side by side: times to the first token, cold against warm.
// Kept in this page only. Knows times and cached shares, not how they were measured.

import { byId, element, milliseconds, number, percent, times } from "./format.js";

export const WARM_SHARE = 0.5; // of the prompt from the cache, and more

export function isWarm(request) {
  return request.cached_tokens >= WARM_SHARE * request.prompt_tokens;
}

export class Comparison {
  #sends = new Map(); // prompt -> its sends, oldest first

  // `send`: {prompt_tokens, cached_tokens, seen_ms, server_ms}.
  add(prompt, send) {
    const sends = this.#sends.get(prompt) ?? [];
    sends.push(send);
    this.#sends.set(prompt, sends);
    this.show(prompt);
  }

  show(prompt) {
    const sends = this.#sends.get(prompt) ?? [];
    byId("comparison-empty").hidden = sends.length > 0;
    byId("comparison-box").hidden = sends.length === 0;
    byId("verdict").textContent = verdict(sends);
    const slowest = Math.max(...sends.map((send) => send.seen_ms));
    const shown = sends.map((send, index) => [send, index]);
    const rows = shown.length > 8 ? [shown[0], ...shown.slice(-7)] : shown; // the first, and the latest
    byId("comparison").replaceChildren(...rows.map(([send, index]) => row(send, index, slowest)));
  }
}

// In one sentence how much sooner the latest send was than the last cold one before it.
function verdict(sends) {
  const latest = sends.at(-1);
  if (!latest) return "";
  const cold = sends.slice(0, -1).findLast((send) => !isWarm(send));
  if (isWarm(latest) && cold) return `${times(cold.seen_ms / latest.seen_ms)} sooner`;
  if (isWarm(latest)) return "warm from the start";
  return "Send again for a warm one";
}

function row(send, index, slowest) {
  const kind = isWarm(send) ? "warm" : "cold";
  const bar = element("span", { class: `time-bar ${kind}` });
  bar.style.setProperty("width", `${Math.max(0.5, (100 * send.seen_ms) / slowest)}%`);
  return element(
    "tr",
    { "data-kind": kind },
    element("th", { scope: "row" }, `${number(index + 1)}, ${kind}`),
    element("td", {}, percent(send.cached_tokens / send.prompt_tokens)),
    element("td", { class: "bar-cell", "aria-hidden": "true" }, bar),
    element("td", { class: "number seen" }, milliseconds(send.seen_ms)),
    element("td", { class: "number" }, milliseconds(send.server_ms)),
  );
}
