// Numbers in words, and elements in one call. Knows nothing of the server.

const NUMBER = new Intl.NumberFormat("en-US");
const BYTE_UNITS = ["bytes", "kB", "MB", "GB", "TB"];
const SVG = "http://www.w3.org/2000/svg";

export function number(value) {
  return value == null ? "–" : NUMBER.format(Math.round(value));
}

export function milliseconds(value) {
  if (value == null) return "–";
  if (value < 9.95) return `${value.toFixed(1)} ms`;
  return value < 99_500 ? `${number(value)} ms` : duration(value / 1000);
}

export function percent(share) {
  if (share == null) return "–";
  // Neither all nor nothing by rounding.
  if (share > 0 && share < 0.01) return "<1%";
  if (share < 1 && share > 0.99) return ">99%";
  return `${Math.round(100 * share)}%`;
}

export function times(factor) {
  return `${factor < 9.95 ? factor.toFixed(1) : number(factor)} ×`;
}

export function bytes(value) {
  if (value == null) return "–";
  let unit = 0;
  while (value >= 999.5 && unit < BYTE_UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit > 0 && value < 9.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${BYTE_UNITS[unit]}`;
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((one, other) => one - other);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

export function plural(count, one, several = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : several}`;
}

// Characters that would vanish or garble the page, each by its own picture; line breaks and tabs stay.
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (sign) =>
    String.fromCharCode(0x2400 + sign.charCodeAt(0)),
  );
}

export function beginning(text, longest) {
  const words = text.split(/\s+/).filter(Boolean).join(" ");
  const signs = Array.from(words);
  return signs.length <= longest ? words : `${signs.slice(0, longest - 1).join("")}…`;
}

// An element with attributes and children; strings become text, never HTML.
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

// Only what changed is touched, so that screen readers stay quiet and selections stay.
export function setText(id, text) {
  const target = byId(id);
  if (target.textContent !== text) target.textContent = text;
}
