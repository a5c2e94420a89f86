// A prompt coloured by origin, with the reasons on hover and on focus, a bar, a legend and a table.
// Knows spans with text; nothing of requests.

import { beginning, byId, element, number, percent, visible } from "./format.js";
import { ORIGINS, originOf, reasonOf, tokensBy } from "./origins.js";

export class PromptView {
  #spans = [];
  #shown = null; // the element whose reason is shown
  #box = byId("spans");
  #tip = byId("tip");

  constructor() {
    this.#drawLegend(null);
    this.#box.addEventListener("focusin", (event) => this.#focused(event.target));
    this.#box.addEventListener("focusout", () => this.#hide());
    this.#box.addEventListener("pointerover", (event) => this.#hovered(event));
    this.#box.addEventListener("pointerleave", () => this.#left());
    this.#box.addEventListener("keydown", (event) => this.#pressed(event));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#hide();
    });
  }

  // `verdict` says whether this is a forecast or what happened; `choice` tells of approximate reuse.
  show(spans, verdict, choice = "") {
    this.#hide();
    this.#spans = spans;
    byId("origin-empty").hidden = true;
    byId("spans-box").hidden = false;
    byId("spans-details").hidden = false;
    byId("origin-verdict").textContent = verdict;
    byId("choice").textContent = choice;
    this.#drawLegend(tokensBy(spans));
    this.#drawBar();
    this.#box.replaceChildren(...spans.map((span, index) => this.#drawn(span, index)));
    byId("spans-table").replaceChildren(...spans.map(row));
  }

  #drawLegend(counts) {
    const total = counts && Object.values(counts).reduce((sum, count) => sum + count, 0);
    const items = ORIGINS.map(({ name, letter, meaning }) => {
      const item = element(
        "li",
        { title: meaning },
        element("span", { class: "badge", "data-origin": name, "aria-hidden": "true" }, letter),
        name,
      );
      if (counts) {
        const share = total ? percent(counts[name] / total) : "–";
        item.append(
          " ",
          element("span", { class: "count" }, counts[name] ? `${number(counts[name])} (${share})` : "0"),
        );
        if (!counts[name]) item.classList.add("none");
      }
      return item;
    });
    byId("legend").replaceChildren(...items);
  }

  #drawBar() {
    const parts = this.#spans.map((span) => {
      const part = element("span", { class: "stretch", "data-origin": span.origin });
      part.style.setProperty("flex-grow", span.end - span.start);
      return part;
    });
    byId("origin-bar").replaceChildren(...parts);
  }

  #drawn(span, index) {
    const tokens = `tokens ${number(span.start)} to ${number(span.end)}`;
    const text = span.text === null ? `[${tokens}]` : marked(span.text);
    const [breaks] = text.match(/^\n*/); // its letter stands with its first words
    const label =
      span.text === null ? `${span.origin}, ${tokens}` : `${span.origin}, ${tokens}: ${beginning(text, 80)}`;
    return element(
      "span",
      {
        class: "span",
        role: "option",
        tabindex: index === 0 ? "0" : "-1",
        "aria-selected": "false",
        "aria-label": label,
        "aria-describedby": "tip",
        "data-origin": span.origin,
        "data-index": index,
      },
      breaks,
      element("span", { class: "letter", "data-letter": originOf(span).letter }),
      text.slice(breaks.length),
    );
  }

  #hovered(event) {
    const target = event.target.closest(".span");
    if (target) this.#show(target, { x: event.clientX, y: event.clientY });
  }

  #focused(target) {
    for (const each of this.#box.children) {
      const isTarget = each === target;
      each.tabIndex = isTarget ? 0 : -1;
      each.setAttribute("aria-selected", String(isTarget));
    }
    this.#show(target, null);
  }

  // The pointer has gone: back to what has the focus, if anything has.
  #left() {
    const focused = this.#box.querySelector(".span:focus");
    if (focused) this.#show(focused, null);
    else this.#hide();
  }

  #pressed(event) {
    const spans = [...this.#box.children];
    const at = spans.indexOf(document.activeElement);
    const steps = {
      ArrowRight: at + 1,
      ArrowDown: at + 1,
      ArrowLeft: at - 1,
      ArrowUp: at - 1,
      Home: 0,
      End: spans.length - 1,
    };
    const next = spans[steps[event.key]];
    if (at < 0 || !(event.key in steps)) return;
    event.preventDefault();
    next?.focus();
  }

  #show(target, pointer) {
    const span = this.#spans[Number(target.dataset.index)];
    const { letter } = originOf(span);
    const details = [
      `tokens ${number(span.start)} to ${number(span.end)} (${number(span.end - span.start)})`,
    ];
    if (span.donor) details.push(`chunk ${span.donor.slice(0, 8)}`);
    if (span.estimated) details.push("its edges in the text are estimated");
    this.#tip.replaceChildren(
      element(
        "strong",
        {},
        element("span", { class: "badge", "data-origin": span.origin, "aria-hidden": "true" }, letter),
        span.origin,
      ),
      element("span", { class: "tip-reason" }, visible(reasonOf(span))),
      element("span", { class: "tip-details" }, details.join(" · ")),
    );
    this.#shown?.classList.remove("shown");
    this.#shown = target;
    target.classList.add("shown");
    this.#tip.hidden = false;
    this.#placeTip(target, pointer);
  }

  // Above the line that is pointed at, or below it where there is no room; inside the box in any case.
  #placeTip(target, pointer) {
    const box = byId("spans-box").getBoundingClientRect();
    const lines = [...target.getClientRects()].filter((line) => line.width > 0);
    const line =
      (pointer && lines.find((each) => each.top <= pointer.y && pointer.y <= each.bottom)) ?? lines[0];
    if (!line) return;
    const { width, height } = this.#tip.getBoundingClientRect();
    const wanted = (pointer ? pointer.x - width / 3 : line.left) - box.left;
    const left = Math.max(0, Math.min(wanted, box.width - width));
    const isRoomAbove = line.top - height - 10 > 0;
    const top = isRoomAbove ? line.top - box.top - height - 6 : line.bottom - box.top + 6;
    this.#tip.style.setProperty("left", `${left}px`);
    this.#tip.style.setProperty("top", `${top}px`);
  }

  #hide() {
    this.#tip.hidden = true;
    this.#shown?.classList.remove("shown");
    this.#shown = null;
  }
}

// Text of nothing but space would not be seen.
function marked(text) {
  return text.trim() ? visible(text) : visible(text).replace(/\n/g, "↵\n").replace(/[ \t]/g, "·");
}

function row(span) {
  return element(
    "tr",
    {},
    element("td", { class: "number" }, `${number(span.start)} to ${number(span.end)}`),
    element(
      "td",
      { class: "origin" },
      element(
        "span",
        { class: "badge", "data-origin": span.origin, "aria-hidden": "true" },
        originOf(span).letter,
      ),
      span.origin,
    ),
    element("td", {}, visible(reasonOf(span))),
    element("td", { class: "excerpt" }, span.text === null ? "–" : beginning(visible(span.text), 60)),
  );
}
