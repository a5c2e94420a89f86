// Times to the first token of recent requests as dots over a logarithmic scale, drawn as SVG.
// Cold and warm differ in shape and filling, not in colour only. Knows requests as the server counts them.

import { isWarm } from "./comparison.js";
import { byId, drawn, milliseconds, number, percent } from "./format.js";

const HEIGHT = 190;
const MARGIN = { top: 10, right: 8, bottom: 10, left: 52 };
const MOST = 60; // requests shown

export class Chart {
  #box = byId("chart");
  #requests = [];
  #chosen = null; // the request that the read-out tells of; null: the newest

  constructor() {
    new ResizeObserver(() => this.#draw()).observe(this.#box);
    this.#box.addEventListener("pointermove", (event) => this.#pointed(event));
    this.#box.addEventListener("pointerdown", (event) => this.#pointed(event));
    this.#box.addEventListener("pointerleave", () => this.#choose(null));
    this.#box.addEventListener("blur", () => this.#choose(null));
    this.#box.addEventListener("keydown", (event) => this.#pressed(event));
  }

  show(requests) {
    const recent = requests.slice(-MOST);
    const isSame = recent.length === this.#requests.length && recent.at(-1)?.at === this.#requests.at(-1)?.at;
    if (isSame) return;
    const chosen = this.#chosen === null ? undefined : this.#requests[this.#chosen].at;
    this.#requests = recent;
    const index = recent.findIndex((request) => request.at === chosen);
    this.#chosen = index < 0 ? null : index;
    this.#draw();
  }

  #draw() {
    const width = this.#box.clientWidth;
    if (!width) return;
    const scale = this.#scale();
    const picture = drawn("svg", {
      viewBox: `0 0 ${width} ${HEIGHT}`,
      height: HEIGHT,
      width,
      "aria-hidden": "true",
    });
    for (const tick of scale.ticks) {
      const y = scale.y(tick);
      picture.append(
        drawn("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
        drawn("text", { class: "tick", x: 0, y: y + 4 }, label(tick)),
      );
    }
    this.#requests.forEach((request, index) => {
      const mark = dot(request, this.#x(index, width), scale.y(request.ttft_ms));
      if (index === this.#chosen) mark.classList.add("chosen");
      picture.append(mark);
    });
    this.#box.replaceChildren(picture);
    this.#tell();
  }

  // Newest at the right edge; a few requests stay close together.
  #x(index, width) {
    const room = width - MARGIN.left - MARGIN.right - 12;
    const step = Math.min(room / Math.max(1, this.#requests.length - 1), 18);
    return width - MARGIN.right - 6 - step * (this.#requests.length - 1 - index);
  }

  // Whole powers of ten around the values.
  #scale() {
    const values = this.#requests.map((request) => Math.max(request.ttft_ms, 0.1));
    const low = values.length ? Math.floor(Math.log10(Math.min(...values))) : 1;
    const high = values.length ? Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values)))) : 4;
    const room = HEIGHT - MARGIN.top - MARGIN.bottom;
    const y = (value) => MARGIN.top + (room * (high - Math.log10(Math.max(value, 0.1)))) / (high - low);
    const ticks = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index));
    return { y, ticks };
  }

  #pointed(event) {
    if (!this.#requests.length) return;
    const box = this.#box.getBoundingClientRect();
    const at = event.clientX - box.left;
    const distances = this.#requests.map((_, index) => Math.abs(this.#x(index, box.width) - at));
    this.#choose(distances.indexOf(Math.min(...distances)));
  }

  #pressed(event) {
    const last = this.#requests.length - 1;
    const now = this.#chosen ?? last + (event.key === "ArrowLeft" ? 1 : 0);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.#choose(Math.max(0, Math.min(last, next)));
  }

  #choose(index) {
    if (index === this.#chosen) return;
    this.#chosen = index;
    this.#draw();
  }

  #tell() {
    const readout = byId("chart-readout");
    const request = this.#requests[this.#chosen ?? this.#requests.length - 1];
    const text = request
      ? `${this.#chosen === null ? "Latest: " : ""}${described(request)}`
      : "No requests yet.";
    if (readout.textContent !== text) readout.textContent = text;
  }
}

function described(request) {
  const share = percent(request.cached_tokens / request.prompt_tokens);
  const kind = isWarm(request) ? "warm" : "cold";
  const tokens = `${share} of ${number(request.prompt_tokens)} tokens cached`;
  return `${milliseconds(request.ttft_ms)}, ${kind}, ${tokens}`;
}

function dot(request, x, y) {
  if (isWarm(request)) return drawn("circle", { class: "dot warm", cx: x, cy: y, r: 4 });
  const points = `M${x} ${y - 4.6}L${x + 4.6} ${y}L${x} ${y + 4.6}L${x - 4.6} ${y}Z`;
  return drawn("path", { class: "dot cold", d: points });
}

function label(value) {
  return value < 1000 ? `${value} ms` : `${number(value / 1000)} s`;
}
