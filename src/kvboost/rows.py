"""Rows of one arena: many texts side by side, what they share stored once, one forward for them all.

A row's KV is a chain of segments. Segments that several rows begin with are computed and kept once; the
last one is the row's own and grows with its answer. A forward takes new tokens of any rows, packed into
one sequence: prompts and single tokens may be mixed. Knows arenas and models, not where KV comes from and
not how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvboost import attention
from kvboost.arena import Arena, Packed
from kvboost.compat import eval_mode, text_config
from kvboost.row_attention import Feed, RowPattern, Stretch

# Tokens of one forward, on a CPU and on a GPU, and the logits that it may give, in elements.
_MAX_TOKENS = {False: 2048, True: 8192}
_MAX_LOGITS = 1 << 26


class Segment:
    """KV of consecutive tokens in slots `[start, start + capacity)`, behind the segments of `before`.

    Of a `clean` one, the slots without a token hold finite numbers too, and may be read under a mask.
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

    @property
    def end(self) -> int:
        """The position of the next token."""
        return self.position + self.length

    @property
    def stretch(self) -> Stretch:
        return Stretch(self.start, self.length, self.position)

    def between(self, arena: Arena, start: int, end: int) -> Packed:
        """KV `[rows, tokens, head_dim]` of the row's positions `[start, end)`, wherever they lie."""
        parts = []
        for segment in (*self.before, self):
            first, last = max(start, segment.position), min(end, segment.end)
            if first < last:
                shift = segment.start - segment.position
                parts.append(arena.between(first + shift, last + shift))
        if len(parts) == 1:
            return parts[0]
        return tuple(torch.cat(slabs, dim=1) for slabs in zip(*parts, strict=True))


@dataclass(frozen=True)
class Extension:
    """New tokens `token_ids` `[n]` of a segment, and of how many of the last ones logits are wanted."""

    segment: Segment
    token_ids: np.ndarray
    wanted: int = 1


class RowLogits(NamedTuple):
    """Logits `[n, vocab]` of extension `number`, from its wanted token number `first` on."""

    number: int
    first: int
    logits: torch.Tensor


def extend(model: Any, arena: Arena, extensions: Sequence[Extension]) -> Iterator[RowLogits]:
    """Run the extensions through the model, as many at once as memory allows, and fill their segments.

    No segment may be extended twice, nor together with one that it is behind. Those that share something
    should be neighbours.
    """
    if not extensions:
        return
    device = model.get_input_embeddings().weight.device
    arena.set_length(arena.capacity)  # the pattern says what is filled
    for block in _blocks(extensions, device.type == "cuda", int(text_config(model).vocab_size)):
        yield from _forward(model, arena, extensions, block, device)


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


def _forward(
    model: Any,
    arena: Arena,
    extensions: Sequence[Extension],
    block: Sequence[_Part],
    device: torch.device,
) -> Iterator[RowLogits]:
    feeds, ids, rows = [], [], []
    wanted: list[np.ndarray] = []
    at = 0
    for index, start, end in block:
        extension = extensions[index]
        segment = extension.segment
        segment.length += end - start
        if segment.length > segment.capacity:
            raise ValueError(f"a segment of {segment.capacity} tokens cannot take {segment.length}")
        feeds.append(_feed(segment, end - start))
        ids.append(extension.token_ids[start:end])
        silent = len(extension.token_ids) - extension.wanted
        if end > silent:
            first = max(start, silent)
            rows.append((index, first - silent, end - first))
            wanted.append(np.arange(at + first - start, at + end - start))
        at += end - start
    pattern = RowPattern(feeds, device)
    keep = torch.from_numpy(np.concatenate(wanted)).to(device) if wanted else 1
    with torch.no_grad(), arena.scatter_at(pattern.slots), attention.patterned(model, pattern):
        output = model(
            input_ids=torch.from_numpy(np.concatenate(ids)).to(device).unsqueeze(0),
            position_ids=pattern.positions.unsqueeze(0),
            attention_mask=torch.zeros(1, 1, at, 1, dtype=arena.slabs[0].dtype, device=device),
            past_key_values=arena,
            use_cache=True,
            logits_to_keep=keep,
        )
    done = 0
    for index, first, count in rows:
        yield RowLogits(index, first, output.logits[0, done : done + count])
        done += count


def _feed(segment: Segment, tokens: int) -> Feed:
    """The last `tokens` of a segment. Of several, what the segment had before is nothing but seen."""
    before = tuple(each.stretch for each in segment.before if each.length)
    old = segment.length - tokens
    if tokens == 1 or not old:
        return Feed(segment.stretch, tokens, before, segment.capacity if segment.clean else segment.length)
    start, _, position = segment.stretch
    return Feed(
        Stretch(start + old, tokens, position + old), tokens, (*before, Stretch(start, old, position))
    )


def can_run(model: Any, arena: Arena) -> bool:
    """Whether every layer of the model lets the rows' attention stand in for its own.

    Leaves the first slot of the arena overwritten.
    """
    calls: list[int] = []

    class _Counting(RowPattern):
        def attend(self, *args: Any) -> tuple[torch.Tensor, None]:
            calls.append(1)
            return super().attend(*args)

    device = model.get_input_embeddings().weight.device
    segment = Segment(0, 1)
    segment.length = 1
    pattern = _Counting([Feed(segment.stretch, 1)], device)
    arena.set_length(arena.capacity)
    try:
        with (
            eval_mode(model),
            torch.no_grad(),
            arena.scatter_at(pattern.slots),
            attention.patterned(model, pattern),
        ):
            model(
                input_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
                position_ids=pattern.positions.unsqueeze(0),
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=arena.slabs[0].dtype, device=device),
                past_key_values=arena,
                use_cache=True,
                logits_to_keep=torch.zeros(1, dtype=torch.long, device=device),
            )
    except Exception:  # whatever a model does with such a call, it runs its rows one by one then
        return False
    return len(calls) == len(arena.layers)
