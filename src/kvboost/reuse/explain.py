"""What would be reused of a prompt, span by span, and why the rest would not.

Made from a look-up that changes nothing. Knows the words, not how they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvboost import html_view
from kvboost.choices import Origin
from kvboost.models import Span
from kvboost.remote.cache import Seen
from kvboost.reuse.plan import GENERATION_REASON, LOSSY_REASON, REMOTE, ReusePlan


@dataclass(frozen=True)
class ExplainedSpan:
    """A span with its text, and where its KV would come from."""

    start: int
    end: int
    origin: Origin
    text: str
    reason: str = ""
    donor: str = ""
    donor_positions: tuple[int, int] | None = None
    donor_uses: int = 0
    donor_on_disk: bool = False  # its KV is not in memory now

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Explanation:
    """Spans that cover the prompt without gaps, in order."""

    prompt_tokens: int
    cached_tokens: int
    spans: tuple[ExplainedSpan, ...]
    choice: str = ""  # why approximate reuse would be used or not, with its estimated cost

    def __iter__(self) -> Iterator[ExplainedSpan]:
        return iter(self.spans)

    @property
    def reuse_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        spans = [{**asdict(span), "origin": span.origin.value} for span in self.spans]
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "choice": self.choice,
            "spans": spans,
        }

    def _repr_html_(self) -> str:
        """For notebooks: the prompt by origin, and why."""
        spans = [(span.start, span.end, span.origin.value, span.reason) for span in self.spans]
        rows = [(f"{s.start} to {s.end}", s.origin.value, s.reason, _beginning(s.text)) for s in self.spans]
        head = f"{self.cached_tokens:,} of {self.prompt_tokens:,} tokens would be reused"
        return (
            html_view.paragraph(head)
            + html_view.origin_bar(spans, self.prompt_tokens)
            + html_view.table(("tokens", "origin", "why", "text"), rows)
            + (html_view.paragraph(self.choice) if self.choice else "")
        )

    def __str__(self) -> str:
        lines = [f"{self.cached_tokens} of {self.prompt_tokens} tokens would be reused"]
        for span in self.spans:
            source = f"from chunk {span.donor[:8]}" if span.donor else span.reason
            source += " on disk" if span.donor_on_disk else ""
            if span.donor and span.reason:
                source += f", {span.reason}"
            lines.append(f"  {span.start:>6}-{span.end:<6} {span.origin.value:<11} {source}")
        if self.choice:
            lines.append(f"  {self.choice}")
        return "\n".join(lines)


def _beginning(text: str, longest: int = 60) -> str:
    words = " ".join(text.split())
    return words if len(words) <= longest else words[: longest - 1] + "…"


def explain_plan(
    plan: ReusePlan,
    token_ids: Sequence[int],
    decode: Callable[[list[int]], str],
    choice: str = "",
    seen: Seen | None = None,
) -> Explanation:
    """What `plan` would reuse of `token_ids`, in words. `choice` is the sentence on approximate reuse.

    `seen` is what a store that several machines share has of them.
    """
    spans = plan.spans()
    if seen is not None:
        spans = _with_remote(spans, plan, seen)
        if seen.moved_tokens:
            moved = f"the shared store has up to {seen.moved_tokens} tokens of text that moved"
            choice = f"{choice}; {moved}" if choice else moved
    donors = {piece.chunk.chunk_id: piece.chunk for piece in [*plan.pieces, *plan.moved_pieces]}

    def donor_of(key: str) -> tuple[tuple[int, int], int, bool] | None:
        chunk = donors.get(key)
        if chunk is None:
            return None
        positions = (chunk.position_start, chunk.position_end)
        return positions, chunk.access_count, not chunk.kv.is_loaded

    return explain_spans(spans, token_ids, decode, donor_of, plan.match.divergence, choice)


def _with_remote(spans: Sequence[Span], plan: ReusePlan, seen: Seen) -> tuple[Span, ...]:
    """The spans, with what another machine has read between the known prefix and `seen.end`."""
    known = plan.prefix_end
    if seen.end <= known:
        return tuple(spans)
    way = f"{REMOTE}, about {seen.ms:.0f} ms"
    lossy = (start for start in seen.starts if plan.lossy_from is not None and start > plan.lossy_from)
    exact_end = max(known, min(lossy, default=seen.end))
    fetched = [
        Span(known, exact_end, Origin.EXACT, way),
        Span(exact_end, seen.end, Origin.APPROXIMATE, f"{LOSSY_REASON}, {way}"),
    ]
    before = [span for span in spans if span.end <= known]
    behind = [replace(span, start=max(span.start, seen.end)) for span in spans if span.end > seen.end]
    if len(behind) == 1 and behind[0].length == 1:
        behind = [replace(behind[0], reason=GENERATION_REASON)]
    return (*before, *(span for span in fetched if span.length), *behind)


def explain_spans(
    spans: Sequence[Span],
    token_ids: Sequence[int],
    decode: Callable[[list[int]], str],
    donor_of: Callable[[str], tuple[tuple[int, int], int, bool] | None],
    divergence: tuple[int, int, int] | None,
    choice: str = "",
) -> Explanation:
    """Spans in words. `choice` is the sentence on approximate reuse.

    `donor_of` gives a chunk's positions, its uses, and whether it is on disk only. `divergence` is (position,
    expected token, found token).
    """
    explained = []
    for span in spans:
        donor = donor_of(span.donor) if span.donor else None
        reason = span.reason
        if divergence is not None and reason.startswith("diverged"):
            at, expected, got = divergence
            reason = (
                f"diverged at token {at}: expected {expected} {decode([expected])!r}, "
                f"got {got} {decode([got])!r}"
            )
        explained.append(
            ExplainedSpan(
                start=span.start,
                end=span.end,
                origin=span.origin,
                text=decode(list(token_ids[span.start : span.end])),
                reason=reason,
                donor=span.donor,
                donor_positions=donor[0] if donor else None,
                donor_uses=donor[1] if donor else 0,
                donor_on_disk=donor[2] if donor else False,
            )
        )
    cached = sum(span.length for span in spans if span.origin is not Origin.LIVE)
    return Explanation(len(token_ids), cached, tuple(explained), choice)
