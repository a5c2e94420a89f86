"""Warming documents that will be found anywhere: which are read together, behind what, and what is kept.

A document that is read first of all holds an attention sink in its first tokens and transfers badly. So
documents are read in windows, each behind those before it. The first of a window stands behind the text that
the caller names, or behind the end of the document before it: that does better than a neutral text, which
leads in a document that is alone. A window is an ordinary text, read and stored exactly. Knows the parts of
an engine, no answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvboost.batching.many import shown
from kvboost.errors import InvalidRequestError
from kvboost.executor.warming import Warmer
from kvboost.executor.windows import Packer, Place, Window
from kvboost.identity.namespace import Namespace
from kvboost.models import WarmResult
from kvboost.parts.engine_parts import EngineParts
from kvboost.requests.encoding import UNBOUNDED, ReadingBounds
from kvboost.requests.prompts import Prompt, TokenizedPrompt
from kvboost.requests.request import checked_list

LEAD_IN_TOKENS = 256  # at most, of another document or the neutral text
MIN_BEFORE_TOKENS = 32  # what was read behind fewer counts as read alone
SEPARATOR = "\n\n"  # between two documents
_NO_TOKENS = np.zeros(0, dtype=np.int64)
LEAD_IN = (
    "The following pages were collected from several places. They do not depend on each other, and they may "
    "be read in any order. Some of them are short notes, others are parts of longer texts. Each one begins "
    "on a line of its own and stands for itself: what one of them says need not hold for the next. Names, "
    "numbers and dates are given as they were found.\n\n"
)


@dataclass(frozen=True)
class DocumentPlan:
    """What is to be read of `documents`, ids `[tokens]` each, for one salt.

    `number_of` says by position in the call which of the different documents it is. Those in no window are
    held already. `behind` are the ids that the caller wants them to follow; none = any text. `gated` says why
    nothing is read at all. `evicted` counts chunks that went for a window, by its first document.
    """

    documents: list[np.ndarray]
    number_of: list[int]
    behind: np.ndarray
    salt: str
    windows: list[Window]
    gated: str = ""
    evicted: dict[int, int] = field(default_factory=dict)

    @property
    def held_tokens(self) -> int:
        """Tokens of the documents that need not be read."""
        read = {place.document for window in self.windows for place in window.places}
        left = (len(ids) for number, ids in enumerate(self.documents) if number not in read)
        return 0 if self.gated else sum(left)


class DocumentWarmer:
    """Fills the cache of one engine with documents."""

    def __init__(self, parts: EngineParts, warmer: Warmer) -> None:
        self._parts = parts
        self._warmer = warmer

    def warm(
        self,
        texts: Sequence[str | Sequence[int]],
        behind: Prompt | None,
        cache_salt: str | None,
        progress: bool | None,
    ) -> list[WarmResult]:
        """Read documents that the cache does not hold yet; a result for each, in order."""
        plan = self.plan(texts, behind, cache_salt)
        count = sum(len(window.places) for window in plan.windows)
        for _ in shown(self._read(plan), count, progress, "reading"):
            pass
        return self.results(plan)

    def _read(self, plan: DocumentPlan) -> Iterator[Place]:
        """Read the windows one after the other; yields what was read."""
        for window in plan.windows:
            namespace = self._parts.namespace(plan.salt)  # the model may have changed since the last one
            if not namespace.gated:
                report = self._warmer.read(window.token_ids, len(window.token_ids), namespace)
                plan.evicted[window.places[0].document] = report.evicted
            yield from window.places

    # --- planning ----------------------------------------------------------------------------

    def plan(
        self,
        texts: Sequence[str | Sequence[int]],
        behind: Prompt | TokenizedPrompt | None,
        cache_salt: str | None,
        *,
        max_tokens: int | None = None,
        bounds: ReadingBounds = UNBOUNDED,
    ) -> DocumentPlan:
        """Which documents are read in which windows, of at most `max_tokens` tokens. Computes nothing."""
        parts, salt = self._parts, self._parts.salt(cache_salt)
        given = [
            self._read_one(number, text, bounds) for number, text in enumerate(checked_list(texts, "texts"))
        ]
        if reason := parts.approximation.refusal(0, calibrating=True):
            raise InvalidRequestError(
                f"documents are read to be found anywhere, and this engine reuses no moved text ({reason}); "
                "call warm with the beginning of your prompts instead"
            )
        follows = _NO_TOKENS
        if behind is not None:
            follows = parts.reader.read(behind, salt, warming=True, bounds=bounds).token_ids
        most = min((n for n in (parts.requests.max_positions, max_tokens) if n is not None), default=None)
        _check_lengths(given, len(follows), most)
        by_ids: dict[bytes, int] = {}
        number_of = [by_ids.setdefault(ids.tobytes(), len(by_ids)) for ids in given]
        documents = [np.frombuffer(raw, dtype=np.int64) for raw in by_ids]
        namespace = parts.namespace(salt)
        plan = DocumentPlan(documents, number_of, follows, salt, [], namespace.gated)
        if not plan.gated:
            self._pack(plan, most, namespace)
        return plan

    def _read_one(self, number: int, text: str | Sequence[int], bounds: ReadingBounds) -> np.ndarray:
        try:
            return self._parts.reader.read_piece(text, "document", bounds)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"document {number}: {error}") from error

    def _pack(self, plan: DocumentPlan, most: int | None, namespace: Namespace) -> None:
        """Put the documents that are not held already into windows of at most `most` tokens, in order."""
        reader = self._parts.reader
        separator = reader.read_piece(SEPARATOR, "separator")
        neutral = reader.read(LEAD_IN, warming=True).token_ids
        start = neutral[: len(neutral) - len(reader.read_piece(LEAD_IN, "lead-in"))]  # special tokens
        packer = Packer(separator, most)
        for number, ids in enumerate(plan.documents):
            if self._held(ids, plan, namespace, used=True)[1] == len(ids):
                continue
            lead, before = plan.behind, plan.documents[number - 1]  # the first one follows the last
            if not len(lead):
                lead = neutral[:LEAD_IN_TOKENS]
                if len(plan.documents) > 1 and len(before) >= MIN_BEFORE_TOKENS:
                    lead = np.concatenate([start, before[-LEAD_IN_TOKENS:], separator])
                lead = lead if most is None else lead[: most - len(ids)]  # it gives way to a long document
            packer.add(number, ids, lead)
        plan.windows.extend(packer.windows())

    def _held(
        self, ids: np.ndarray, plan: DocumentPlan, namespace: Namespace, *, used: bool = False
    ) -> tuple[int, int]:
        """Chunks and tokens of a document that are held in one piece, behind the text asked for or any."""
        least = 0 if len(plan.behind) else MIN_BEFORE_TOKENS  # what the caller names is enough, however short
        held = self._parts.manager.find_text(ids, namespace, plan.behind, min_before=least, used=used)
        return len(held), sum(piece.end - piece.start for piece in held)

    # --- results -----------------------------------------------------------------------------

    def results(self, plan: DocumentPlan) -> list[WarmResult]:
        """What the cache holds of each document now, in the order of the call."""
        namespace = self._parts.namespace(plan.salt)
        kept = {
            place.document: self._kept_in(window, place, namespace)
            for window in plan.windows
            for place in window.places
        }
        for number, ids in enumerate(plan.documents):
            if number not in kept:
                kept[number] = self._held(ids, plan, namespace) if not plan.gated else (0, 0)
        found = [
            replace(self._result(len(ids), *kept[n], plan.gated), evicted_chunks=plan.evicted.get(n, 0))
            for n, ids in enumerate(plan.documents)
        ]
        again = [
            replace(each, evicted_chunks=0) for each in found
        ]  # counted once, however often it was given
        first = {number: place for place, number in reversed(list(enumerate(plan.number_of)))}
        return [(found if first[n] == place else again)[n] for place, n in enumerate(plan.number_of)]

    def _kept_in(self, window: Window, place: Place, namespace: Namespace) -> tuple[int, int]:
        """Chunks and tokens of a document that are kept in its window."""
        match = self._parts.manager.match_prefix(window.token_ids[: place.end], namespace)
        chunks = sum(place.start < piece.end for piece in match.matches)
        return chunks, max(0, match.length - place.start)

    def _result(self, total: int, chunks: int, kept: int, gated: str) -> WarmResult:
        chunk_size, tail = self._parts.settings.chunk_size, total % self._parts.settings.chunk_size
        warning, shortest = None, self._parts.manager.min_run_tokens
        if gated:
            warning = f"not kept, {gated}"
        elif kept < total:
            warning = (
                f"{kept} of its {total} tokens are kept: there is no room for the others; raise max_chunks "
                "or max_cache_bytes, or warm fewer documents"
            )
        elif total < shortest:
            warning = (
                f"fewer than {shortest} tokens are found only behind the text that they were read behind"
            )
        return WarmResult(chunks, total, chunk_size, tail == 0, tail, warning)


def _check_lengths(documents: Sequence[np.ndarray], before: int, most: int | None) -> None:
    """Refuse documents that do not fit behind `before` tokens."""
    for number, ids in enumerate(documents):
        if most is not None and before + len(ids) > most:
            what = f"document {number} has {len(ids)} tokens"
            behind = f" and `behind` has {before}" if before else ""
            raise InvalidRequestError(f"{what}{behind}, and at most {most} fit; split the document")
