// What the server does now: figures, chart, tiers, batch, chunks; asked for every second and a half.
// Rests while the page is hidden. Knows /v1/cache/stats.

import { Chart } from "./chart.js";
import { isWarm } from "./comparison.js";
import {
  byId,
  bytes,
  duration,
  element,
  median,
  milliseconds,
  number,
  percent,
  plural,
  setText,
  times,
} from "./format.js";

const EVERY_MS = 1500;
const AFTER_FAILURE_MS = 5000;
const PATIENCE_MS = 10_000;
const MOST_CELLS = 64; // sequences of the batch drawn as cells

export class Live {
  #api;
  #chart = new Chart();
  #timer = null;
  #asking = false;
  #isRefused = false; // asking again without another key is no use
  #drawn = new Map(); // what each card shows, so that nothing is drawn twice

  constructor(api) {
    this.#api = api;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#rest() : this.refresh()));
  }

  // Ask now, and regularly from now on; after a new key too.
  refresh() {
    this.#isRefused = false;
    clearTimeout(this.#timer);
    if (!this.#asking) this.#ask();
  }

  #rest() {
    clearTimeout(this.#timer);
    this.#state("paused", "Paused");
  }

  async #ask() {
    this.#asking = true;
    const { key } = this.#api;
    let pause = EVERY_MS;
    try {
      this.#show(await this.#api.get("v1/cache/stats?chunks=10", AbortSignal.timeout(PATIENCE_MS)));
      this.#notice("");
      this.#state("live", "Live");
    } catch (error) {
      pause = AFTER_FAILURE_MS;
      this.#failed(error);
    } finally {
      this.#asking = false;
    }
    if (key !== this.#api.key)
      this.refresh(); // it was changed meanwhile
    else if (!document.hidden && !this.#isRefused) this.#timer = setTimeout(() => this.#ask(), pause);
  }

  #failed(error) {
    this.#isRefused = error.status === 401 || error.status === 403;
    if (this.#isRefused) {
      this.#state("locked", "Key needed");
      this.#notice(
        "Live figures need a key. Enter it under “API key”; where the server has an admin key, that one.",
      );
    } else {
      this.#state("lost", "No connection");
      this.#notice(error.name === "TimeoutError" ? "The server takes long to answer." : error.message);
    }
  }

  #state(state, words) {
    byId("state").dataset.state = state;
    setText("state", words);
  }

  #notice(text) {
    byId("stats-notice").hidden = !text;
    setText("stats-notice", text);
  }

  #show(stats) {
    setText(
      "serving",
      `${stats.model} · ${stats.mode.replaceAll("_", " ")} · up ${duration(stats.uptime_s)}`,
    );
    this.#showFigures(stats);
    this.#chart.show(stats.requests.recent);
    this.#fill("tiers", stats.cache, tiers);
    this.#fill("batch", { batch: stats.batch, worker: stats.worker }, batch);
    this.#fill("chunks", stats.chunks ?? [], chunks);
  }

  #fill(id, data, draw) {
    const key = JSON.stringify(data);
    if (this.#drawn.get(id) === key) return;
    this.#drawn.set(id, key);
    byId(id).replaceChildren(...draw(data));
  }

  #showFigures({ requests, worker, cache }) {
    setText("hit-share", requests.count ? percent(requests.hit_share) : "–");
    setText(
      "hit-share-note",
      requests.count ? `of prompt tokens, ${plural(requests.count, "request")}` : "no requests yet",
    );
    const warm = median(requests.recent.filter(isWarm).map((request) => request.ttft_ms));
    const cold = median(
      requests.recent.filter((request) => !isWarm(request)).map((request) => request.ttft_ms),
    );
    setText("first-warm", milliseconds(warm));
    setText("first-warm-note", firstTokenNote(warm, cold));
    setText("running", number(worker.running));
    setText("running-note", worker.waiting ? `${number(worker.waiting)} waiting` : "none waiting");
    setText("saved", cache.tokens_saved ? number(cache.tokens_saved) : "–");
    setText("saved-note", cache.tokens_saved ? savedNote(cache.prefill_seconds_saved) : "nothing reused yet");
  }
}

function firstTokenNote(warm, cold) {
  if (cold === null) return warm === null ? "no requests yet" : "no cold request to compare";
  if (warm === null) return `cold ${milliseconds(cold)}`;
  return `cold ${milliseconds(cold)}, ${times(cold / warm)}`;
}

function savedNote(seconds) {
  return seconds ? `not read again, ${duration(seconds)} saved` : "not read again";
}

// --- cards -----------------------------------------------------------------------------------

function tiers(cache) {
  const memory = tier("Memory", cache, [
    ["Pinned", number(cache.pinned_chunks)],
    ["Evicted", number(cache.evicted_chunks)],
  ]);
  const shared = cache.remote ? [sharedStore(cache.remote)] : [];
  if (!cache.disk) {
    const text = cache.remote ? "No disk tier." : "No disk tier: what is kept ends with the server.";
    return [memory, ...shared, element("p", { class: "aside" }, text)];
  }
  const disk = tier("Disk", { ...cache.disk, max_bytes: cache.disk.allocated_bytes }, [
    ["On disk only", number(cache.chunks_on_disk_only)],
    ["Not yet saved", number(cache.disk.unsaved_chunks)],
  ]);
  return [memory, disk, ...shared];
}

// What several machines share; how much it holds, it alone knows.
function sharedStore(remote) {
  const missed = Object.values(remote.misses).reduce((sum, count) => sum + count, 0);
  return element(
    "div",
    { class: "tier" },
    element(
      "p",
      { class: "tier-head" },
      element("strong", {}, "Shared store"),
      element("span", {}, remote.state === "up" ? "up" : `given up: ${remote.state}`),
    ),
    element("p", { class: "aside place" }, remote.address),
    factList([
      ["Read", bytes(remote.read_bytes)],
      ["Written", bytes(remote.written_bytes)],
      ["Misses", number(missed)],
    ]),
  );
}

// The meter shows the budget that ends first.
function tier(name, kept, facts) {
  const size = kept.max_bytes ? `${bytes(kept.bytes)} of ${bytes(kept.max_bytes)}` : bytes(kept.bytes);
  const count = kept.max_chunks
    ? `${number(kept.chunks)} of ${number(kept.max_chunks)}`
    : number(kept.chunks);
  const shares = [];
  if (kept.max_bytes) shares.push(kept.bytes / kept.max_bytes);
  if (kept.max_chunks) shares.push(kept.chunks / kept.max_chunks);
  const parts = [
    element("p", { class: "tier-head" }, element("strong", {}, name), element("span", {}, size)),
    factList([["Chunks", count], ...facts]),
  ];
  if (shares.length) parts.splice(1, 0, meter(Math.max(...shares)));
  return element("div", { class: "tier" }, ...parts);
}

function meter(share) {
  const filled = element("span", { class: "meter-fill" });
  filled.style.setProperty("width", `${Math.min(100, 100 * share)}%`);
  return element("div", { class: "meter", "aria-hidden": "true" }, filled);
}

function factList(facts) {
  const pairs = facts.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)),
  );
  return element("dl", { class: "fact-list" }, ...pairs);
}

function batch({ batch: now, worker }) {
  const answered = [
    ["Answered", number(worker.answered)],
    ["Cancelled", number(worker.cancelled)],
    ["Failed", number(worker.failed)],
    ["Refused", number(worker.refused)],
    ["Timed out", number(worker.timed_out)],
  ];
  if (!now)
    return [
      element("p", { class: "aside" }, "Batching is off: one request after the other."),
      factList(answered),
    ];
  const used = now.sequences
    ? `${number(now.sequences)} of ${number(now.max_sequences)}`
    : `idle, room for ${number(now.max_sequences)}`;
  const parts = [
    element("p", { class: "tier-head" }, element("strong", {}, "Sequences"), element("span", {}, used)),
  ];
  if (now.max_sequences <= MOST_CELLS) parts.push(cells(now.sequences, now.max_sequences));
  else parts.push(meter(now.sequences / now.max_sequences));
  const work = [
    ["Steps", number(now.steps)],
    ["Tokens written", number(now.decoded_tokens)],
    ["Tokens read", number(now.prefilled_tokens)],
    ["Shared tokens", number(now.shared_tokens)],
    ["Resident tokens", number(now.resident_tokens)],
    ["KV memory", bytes(now.kv_bytes)],
  ];
  return [...parts, factList(work), element("hr"), factList(answered)];
}

function cells(filled, total) {
  const made = Array.from({ length: total }, (_, index) =>
    element("span", { class: index < filled ? "cell filled" : "cell" }),
  );
  return element("div", { class: "cells", "aria-hidden": "true" }, ...made);
}

function chunks(most) {
  if (!most.length)
    return [element("p", { class: "empty" }, "Nothing stored yet. The first prompt fills it.")];
  const highest = Math.max(1, ...most.map((chunk) => chunk.uses));
  const head = ["Chunk", "Tokens", "Uses", "Tier", "Age"].map((name) =>
    element("th", { scope: "col", class: ["Tokens", "Uses", "Age"].includes(name) ? "number" : "" }, name),
  );
  const rows = most.map((chunk) => {
    const uses = element("td", { class: "number uses" }, number(chunk.uses));
    uses.style.setProperty("--share", `${(100 * chunk.uses) / highest}%`);
    const name = element("th", { scope: "row", class: "code" }, chunk.id.slice(0, 8));
    if (chunk.text) name.append(element("span", { class: "chunk-text" }, chunk.text.slice(0, 80)));
    return element(
      "tr",
      {},
      name,
      element("td", { class: "number" }, number(chunk.tokens)),
      uses,
      element("td", {}, chunk.tier),
      element("td", { class: "number" }, duration(chunk.age_s)),
    );
  });
  const table = element(
    "table",
    { class: "chunks", "aria-labelledby": "chunks-title" },
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...rows),
  );
  return [table];
}
