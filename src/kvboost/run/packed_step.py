"""One step of many sequences: their KV lies in one arena, shared prefixes once, in one packed forward.

A sequence's KV is a chain of segments. Segments that several sequences begin with are computed and kept once;
the last one is the sequence's own and grows with its answer. A step takes new tokens of any sequences,
packed without padding: prefill and decode may be mixed. Knows arenas and models, not where KV comes from
and not how tokens are chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvboost.compat import probing, text_config
from kvboost.errors import UnsupportedModelError
from kvboost.kernels.observing import Observed, blocks_of
from kvboost.kernels.packed import Feed, PackedAttention
from kvboost.kernels.scope import forward_scope
from kvboost.kernels.windows import windows_now, windows_of
from kvboost.kernels.work import Stretch
from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout, Packed
from kvboost.run.captured import CapturedSteps

_log = logging.getLogger(__name__)
# Tokens of one forward, on a CPU and on a GPU, and the logits that it may give, in elements.
_MAX_TOKENS = {False: 2048, True: 8192}
_MAX_LOGITS = 1 << 26
# The text of a trial at load, and the largest window that it outgrows.
_TRIAL_TOKENS = 16
SMALL_WINDOW = 128
_NO_ROWS = _NONE_MISSING = np.zeros(0, dtype=np.int64)
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class Segment:
    """KV of consecutive tokens in slots `[start, start + capacity)`, behind the segments of `before`.

    Of a `clean` one, the slots without a token hold finite numbers too, and may be read under a mask. Tokens
    may be `missing` `[n]` among those that it has: their indices in it, sorted. They are computed in order.
    """

    def __init__(
        self, start: int, capacity: int, before: tuple[Segment, ...] = (), *, clean: bool = False
    ) -> None:
        self.start = start
        self.capacity = capacity
        self.before = before
        self.clean = clean
        self.position: int = before[-1].position + before[-1].capacity if before else 0
        self.length = 0
        self.missing = _NONE_MISSING

    @property
    def end(self) -> int:
        """The position of the next token."""
        return self.position + (int(self.missing[0]) if len(self.missing) else self.length)

    @property
    def is_filled(self) -> bool:
        """Whether the KV of all its tokens is there."""
        return self.length == self.capacity and not len(self.missing)

    @property
    def to_compute(self) -> np.ndarray:
        """Indices `[n]` in it of the tokens that are still to be computed."""
        return self.missing if len(self.missing) else np.arange(self.length, self.capacity)

    @property
    def stretch(self) -> Stretch:
        return Stretch(self.start, self.length, self.position)


@dataclass(frozen=True)
class SequenceKV:
    """The KV of a sequence by its positions, wherever its segments up to `last` lie in `arena`."""

    arena: Arena
    last: Segment

    def between(self, start: int, end: int) -> Packed:
        """KV `[heads, tokens, head_dim]` of positions `[start, end)`."""
        return self._joined(
            [self.arena.between(first + shift, last + shift) for first, last, shift in self._in(start, end)]
        )

    def gathered(self, positions: torch.Tensor) -> Packed:
        """Copies `[heads, n, head_dim]` of sorted `positions` `[n]`."""
        parts = []
        for first, last, shift in self._in(0, self.last.end):
            inside = positions[(positions >= first) & (positions < last)]
            parts.append(self.arena.gathered(inside + shift))
        return self._joined(parts)

    def stretches(self, start: int, end: int) -> list[Stretch]:
        """Where the KV of positions `[start, end)` lies."""
        return [Stretch(first + shift, last - first, first) for first, last, shift in self._in(start, end)]

    def _in(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Positions `[first, last)` of each segment within `[start, end)`, and how far on their slots are."""
        for segment in (*self.last.before, self.last):
            first, last = max(start, segment.position), min(end, segment.end)
            if first < last:
                yield first, last, segment.start - segment.position

    @staticmethod
    def _joined(parts: list[Packed]) -> Packed:
        return (
            parts[0]
            if len(parts) == 1
            else tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        )


@dataclass(frozen=True)
class Extension:
    """New tokens `token_ids` `[n]` of a segment, and of how many of the last ones logits are wanted."""

    segment: Segment
    token_ids: np.ndarray
    wanted: int = 1


class ExtensionLogits(NamedTuple):
    """Logits `[n, vocab]` of extension `number`, from its wanted token number `first` on."""

    number: int
    first: int
    logits: torch.Tensor


@dataclass(frozen=True)
class ForwardLogits:
    """Logits `[rows, vocab]` of one forward, good until the next, and where each extension's are.

    `spans` has the extension's number, the first of its wanted tokens, its first row and how many there are.
    """

    spans: Sequence[tuple[int, int, int, int]]
    logits: torch.Tensor
    captured_largest: torch.Tensor | None = None

    @property
    def largest_tokens(self) -> torch.Tensor:
        """The token `[rows]` with the largest logit in every row, on the device."""
        return self.logits.argmax(-1) if self.captured_largest is None else self.captured_largest

    def __iter__(self) -> Iterator[ExtensionLogits]:
        for number, first, row, count in self.spans:
            yield ExtensionLogits(number, first, self.logits[row : row + count])


@dataclass
class StepCounts:
    """Forwards of packed steps: `captured` ones, those whose attention our GPU kernel computed, and all.

    `probes` are forwards whose attention was observed.
    """

    forwards: int = 0
    captured: int = 0
    by_kernel: int = 0
    probes: int = 0
    captured_probes: int = 0


class PackedModel:
    """A model over one arena. On a GPU steps are captured, if slot `spare_slot` of it belongs to nobody."""

    def __init__(self, model: Any, arena: Arena, spare_slot: int | None = None) -> None:
        self._model = model
        self._arena = arena
        self._device = model.get_input_embeddings().weight.device
        self.captured: CapturedSteps | None = None
        if spare_slot is not None and self._device.type == "cuda":
            self.captured = CapturedSteps(model, arena, spare_slot)
        self.counts = StepCounts()
        self._is_unobservable = False

    def stats(self) -> dict[str, Any]:
        """Forwards: all, by our GPU kernel, captured ones; graphs and their memory, or why there are none."""
        captured = self.captured
        return {
            **asdict(self.counts),
            "graphs": len(captured.sizes) if captured is not None else 0,
            "graph_bytes": self.captured_bytes,
            "not_captured": captured.why_not if captured is not None else "no GPU",
        }

    @property
    def captured_bytes(self) -> int:
        """Memory of captured steps."""
        return self.captured.nbytes if self.captured is not None else 0

    def extend(self, extensions: Sequence[Extension], state: Hashable = None) -> Iterator[ForwardLogits]:
        """Run the extensions through the model, as many at once as memory allows, and fill their segments.

        No segment may be extended twice, nor together with one that it is behind. Those that share a prefix
        should be adjacent. `state` is that of the model, as captured steps ask for it.
        """
        if not extensions:
            return
        self._arena.set_length(self._arena.capacity)  # the backend knows what is filled
        vocab = int(text_config(self._model).vocab_size)
        for block in _blocks(extensions, self._device.type == "cuda", vocab):
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                forward = self._forward(extensions, block, state)
            yield forward

    def observe(
        self,
        seen: Sequence[Stretch],
        token_ids: np.ndarray,
        own: Stretch,
        state: Hashable = None,
    ) -> torch.Tensor | None:
        """How much attention `token_ids` `[n]` pay to each key of `seen`, and to their own, `[2, positions]`.

        The highest attention probability that any of them gives it, summed over layers and heads. Their KV
        goes to `own`. None where that cannot be seen: without the kernel for GPUs, or with other attention.
        """
        if self._is_unobservable:
            return None
        blocks = blocks_of([*seen, own])
        windows = windows_of(self._model).by_module
        attention = PackedAttention([Feed(own, len(token_ids), tuple(seen))], self._device, windows)
        self._arena.set_length(self._arena.capacity)
        self.counts.probes += 1
        if self.captured is not None:
            scores = self.captured.observe(state, attention, token_ids, blocks)
            if scores is not None:
                self.counts.captured_probes += 1
                return scores
        observed = Observed.of(blocks, own.position + own.length, len(token_ids), self._device)
        attention = PackedAttention(attention.feeds, self._device, windows, observed)
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                self._eager(attention, token_ids, np.array([len(token_ids) - 1]))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel that cannot be made for this model: there is another way
            self._is_unobservable = True
            if not isinstance(error, UnsupportedModelError):
                _log.warning("attention cannot be observed in place: %s", error)
            return None
        return observed.scores

    def _forward(
        self, extensions: Sequence[Extension], block: Sequence[_Part], state: Hashable
    ) -> ForwardLogits:
        feeds, ids, spans = [], [], []
        wanted: list[np.ndarray] = []
        at = row = 0
        for index, start, end in block:
            extension = extensions[index]
            feeds.append(_feed(extension.segment, end - start))
            ids.append(extension.token_ids[start:end])
            silent = len(extension.token_ids) - extension.wanted
            if end > silent:
                first = max(start, silent)
                spans.append((index, first - silent, row, end - first))
                wanted.append(np.arange(at + first - start, at + end - start))
                row += end - first
            at += end - start
        attention = PackedAttention(feeds, self._device, windows_of(self._model).by_module)
        token_ids, keep = np.concatenate(ids), np.concatenate(wanted or [_NO_ROWS])
        self.counts.forwards += 1
        if self.captured is not None:
            replayed = self.captured.run(state, attention, token_ids, keep)
            if replayed is not None:
                self.counts.captured += 1
                self.counts.by_kernel += 1
                return ForwardLogits(spans, *replayed)
        logits = self._eager(attention, token_ids, keep)
        self.counts.by_kernel += attention.is_by_kernel
        return ForwardLogits(spans, logits)

    def _eager(self, attention: PackedAttention, token_ids: np.ndarray, keep: np.ndarray) -> torch.Tensor:
        """Logits `[len(keep), vocab]`, or of no meaning where none are kept."""
        device, arena = self._device, self._arena
        kept: torch.Tensor | int = torch.from_numpy(keep).to(device) if len(keep) else 1
        with torch.no_grad(), arena.scatter_at(attention.slots), forward_scope(self._model, attention):
            output = self._model(
                input_ids=torch.from_numpy(token_ids).to(device).unsqueeze(0),
                position_ids=attention.positions.unsqueeze(0),
                attention_mask=torch.zeros(
                    1, 1, len(token_ids), 1, dtype=arena.slabs[0].dtype, device=device
                ),
                past_key_values=arena,
                use_cache=True,
                logits_to_keep=kept,
            )
        logits: torch.Tensor = output.logits[0]
        if isinstance(kept, torch.Tensor) and len(logits) != len(keep):
            logits = logits[kept]  # the model knows no `logits_to_keep` and gives them all
        return logits


class _Part(NamedTuple):
    """Tokens `[start, end)` of extension `number`."""

    number: int
    start: int
    end: int


def _blocks(extensions: Sequence[Extension], on_gpu: bool, vocab: int) -> Iterator[list[_Part]]:
    """Cut the extensions into forwards of bounded size."""
    most_tokens, most_logits = _MAX_TOKENS[on_gpu], max(1, _MAX_LOGITS // vocab)
    block: list[_Part] = []
    tokens = logits = 0
    for index, extension in enumerate(extensions):
        total, start = len(extension.token_ids), 0
        silent = total - extension.wanted  # before these, no logits are wanted
        while start < total:
            end = min(total, start + most_tokens - tokens)
            if end > silent:
                end = min(end, max(start, silent) + most_logits - logits)
            if end <= start:
                yield block
                block, tokens, logits = [], 0, 0
                continue
            block.append(_Part(index, start, end))
            tokens += end - start
            logits += max(0, end - max(start, silent))
            start = end
    yield block


def _feed(segment: Segment, tokens: int) -> Feed:
    """The next `tokens` of a segment, which has them from now on.

    Of several, what the segment had before is nothing but seen.
    """
    before = tuple(each.stretch for each in segment.before if each.length)
    if len(segment.missing):
        picks, segment.missing = segment.missing[:tokens], segment.missing[tokens:]
        return Feed(segment.stretch, len(picks), before, picks=picks)
    old = segment.length
    segment.length += tokens
    if segment.length > segment.capacity:
        raise ValueError(f"a segment of {segment.capacity} tokens cannot take {segment.length}")
    if tokens == 1 or not old:
        return Feed(segment.stretch, tokens, before, segment.capacity if segment.clean else segment.length)
    start, _, position = segment.stretch
    return Feed(
        Stretch(start + old, tokens, position + old), tokens, (*before, Stretch(start, old, position))
    )


def can_run(model: Any, arena: Arena) -> bool:
    """Whether sequences that run together get what each would get alone; `why_not` says why they do not."""
    return not why_not(model, arena.layout)


def why_not(model: Any, layout: KVLayout) -> str:
    """Why packed attention cannot stand in for the model's own; "" where it can.

    It is tried on sequences of a short text, which is longer than the model's window where that is small.
    """
    learned = windows_now(model)
    if learned.refusal:
        return learned.refusal
    try:
        with probing(model, "running sequences together"):
            difference = _difference(model, layout, trial_tokens(learned.smallest))
    except UnsupportedModelError as error:  # its sequences run one by one then
        return str(error)
    tolerance = LOGIT_TOLERANCE.get(layout.slabs[0].dtype, 1e-1)
    if not difference <= tolerance:
        return f"sequences that run together give other logits: off by {difference:.2g} of {tolerance:.0e}"
    return ""


def trial_tokens(window: int | None) -> int:
    """How long a text must be to show what a window does, where that costs little."""
    return _TRIAL_TOKENS if window is None or window > SMALL_WINDOW else window + _TRIAL_TOKENS


def trial_ids(model: Any, tokens: int) -> np.ndarray:
    """Some text of `tokens` tokens `[tokens]`."""
    return np.arange(tokens, dtype=np.int64) * 7919 % int(text_config(model).vocab_size)


def _difference(model: Any, layout: KVLayout, tokens: int) -> float:
    """Relative difference between sequences behind a shared prefix and one plain forward over their text.

    One sequence has several new tokens, two have one each.
    """
    ids = trial_ids(model, tokens)
    device = model.get_input_embeddings().weight.device
    whole = model(input_ids=torch.from_numpy(ids).to(device).unsqueeze(0), use_cache=False).logits[0].float()
    half = tokens // 2
    arena = Arena(layout, tokens + 2)
    packed = PackedModel(model, arena)
    shared = Segment(0, half)
    long = Segment(half, tokens - half, (shared,))
    singles = [Segment(tokens + number, 1, (shared,), clean=True) for number in (0, 1)]
    got, want = [], []
    for step in (
        [Extension(shared, ids[:half])],
        [
            Extension(long, ids[half:], tokens - half),
            *(Extension(one, ids[half : half + 1]) for one in singles),
        ],
    ):
        ends = [extension.segment.end + len(extension.token_ids) for extension in step]
        for forward in packed.extend(step):
            for number, first, logits in forward:
                start = ends[number] - step[number].wanted + first
                got.append(logits.float())
                want.append(whole[start : start + len(logits)])
    expected = torch.cat(want)
    return float((torch.cat(got) - expected).norm() / expected.norm().clamp_min(1e-6))
