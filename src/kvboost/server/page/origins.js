// Where prompt tokens' KV came from: the four origins, and spans with their text.
// Knows the server's spans, nothing of the page.

export const ORIGINS = [
  { name: "exact", letter: "E", meaning: "stored KV, the same as the model would compute" },
  { name: "approximate", letter: "A", meaning: "stored KV of the same text elsewhere, moved here" },
  { name: "recomputed", letter: "R", meaning: "found, and computed again where it matters" },
  { name: "live", letter: "L", meaning: "not found, computed now" },
];

const BY_NAME = new Map(ORIGINS.map((origin) => [origin.name, origin]));

export function originOf(span) {
  return BY_NAME.get(span.origin);
}

export function reasonOf(span) {
  return span.reason || originOf(span).meaning;
}

export function tokensBy(spans) {
  const counts = Object.fromEntries(ORIGINS.map(({ name }) => [name, 0]));
  for (const span of spans) counts[span.origin] += span.end - span.start;
  return counts;
}

// The spans that an answer reports, with text and details that the explanation before it gave.
//
// An explanation has text by span, not by token. Where the answer's spans end inside one of its spans, the
// place in the text is estimated, and said to be.
export function withText(spans, explained) {
  const known = explained.length > 0 && explained.at(-1).end === spans.at(-1)?.end;
  return spans.map((span) => {
    if (!known) return { ...span, text: null, estimated: false };
    const parts = explained.filter((part) => part.start < span.end && part.end > span.start);
    const text = parts
      .map((part) => part.text.slice(place(part, span.start), place(part, span.end)))
      .join("");
    const estimated = [span.start, span.end].some((edge) =>
      parts.some((part) => part.start < edge && edge < part.end),
    );
    const same = parts.find((part) => part.start === span.start && part.origin === span.origin);
    const reason = same && topic(same.reason) === topic(span.reason) ? same.reason : span.reason;
    return { ...span, reason, donor: same?.donor, text, estimated };
  });
}

// The explanation says the same as the answer with more details behind a colon.
function topic(reason) {
  return reason.split(":")[0];
}

// Where token `index` begins in the text of `part`: exact at its ends, in between at the nearest word.
function place(part, index) {
  if (index <= part.start) return 0;
  if (index >= part.end) return part.text.length;
  const guess = Math.round((part.text.length * (index - part.start)) / (part.end - part.start));
  const before = part.text.lastIndexOf(" ", guess);
  const after = part.text.indexOf(" ", guess);
  const near = [before, after].filter((at) => at > 0 && Math.abs(at - guess) <= 16);
  if (near.length) return near.reduce((one, other) => (guess - one <= other - guess ? one : other));
  const isInsidePair = /[\udc00-\udfff]/.test(part.text[guess] ?? "");
  return isInsidePair ? guess + 1 : guess;
}
