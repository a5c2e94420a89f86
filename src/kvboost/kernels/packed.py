"""Attention of many sequences in one packed forward, over KV that they share.

The new tokens of all sequences go through the model packed, without padding. A prefix that several
sequences share lies in the cache once: their queries attend to it together, in one call, and each
sequence's own part is merged by the log of its sum of exponentials (a softmax over two parts is the weighted
mean of two softmaxes). So a shared prefix is stored and read once, however many sequences there are.

Knows slots of a cache and positions of tokens, no cache and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kvboost.errors import UnsupportedModelError
from kvboost.kernels import observing, positional
from kvboost.kernels.observing import Observed
from kvboost.kernels.partial import merge, partial_attention, takes_flash
from kvboost.kernels.positional import DeviceWork
from kvboost.kernels.scope import AttentionCall, model_attention
from kvboost.kernels.work import SeenKeys, Stretch, work_of

_WINDOW_QUERIES = 512  # per mask of a sliding window
_PICKED_QUERIES = 64  # per mask, where tokens lie between others
# With a sequence of so many new tokens, and no more sequences than this beside it, torch's own kernel is
# faster on a GPU than ours.
_FLASH_QUERIES, _FLASH_FEEDS = 2048, 8


@dataclass(frozen=True)
class Feed:
    """`tokens` new tokens of one sequence: the last ones of `own`, or all of it, behind all of `before`.

    With `picks` `[tokens]` they are those of these indices in `own`, sorted, among tokens whose KV is there;
    from the last of them on `own` is not read. From the start of `own` on, `room` slots may be read under a
    mask; 0: no more than its length.
    """

    own: Stretch
    tokens: int
    before: tuple[Stretch, ...] = ()
    room: int = 0
    picks: np.ndarray | None = None

    @property
    def first(self) -> int:
        """Index within `own` of the first new token."""
        return self.own.length - self.tokens

    @property
    def indices(self) -> np.ndarray:
        """Where in `own` its new tokens are, `[tokens]`."""
        return np.arange(self.first, self.own.length, dtype=np.int64) if self.picks is None else self.picks


class _SharedKeys(NamedTuple):
    """Queries `[first, last)` of the forward, all of which see all of `keys`."""

    keys: Stretch
    first: int
    last: int


class _Lanes(NamedTuple):
    """Single queries of several sequences whose own KV lies in equal steps of `step` slots.

    `room` slots of each may be read.
    """

    queries: tuple[int, ...]
    step: int
    owns: tuple[Stretch, ...]
    room: int

    def joined_by(self, query: int, feed: Feed) -> _Lanes | None:
        """With one sequence more, if its KV continues the steps and all may be read as far as the longest."""
        step = feed.own.start - self.owns[-1].start
        owns, room = (*self.owns, feed.own), min(self.room, feed.room)
        longest = max(own.length for own in owns)
        if self.step not in (0, step) or not longest <= min(step, room):
            return None
        return _Lanes((*self.queries, query), step, owns, room)


class PackedAttention:
    """The backend of one packed forward: what each query of its sequences sees.

    `slots` and `positions` `[n]` say where the KV of the new tokens goes, and their positions in their
    sequences. Feeds of sequences that share a prefix should be adjacent. `windows` says how many tokens a
    token sees, by attention module; None = all of them. With `observed`, all attention is to be by the kernel
    for a GPU, and what is paid to each key is added up.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        device: torch.device,
        windows: Mapping[torch.nn.Module, int | None],
        observed: Observed | None = None,
    ) -> None:
        self.feeds = tuple(feeds)
        self._windows = windows
        self._observed = observed
        self.device = device
        self._starts = np.cumsum([0, *(feed.tokens for feed in feeds)]).tolist()
        self.host_slots = self._of_each(lambda own: own.start)
        self.host_positions = self._of_each(lambda own: own.position)
        self._shared = tuple(self._shared_keys())
        self._masks: dict[Any, torch.Tensor | None] = {}
        self._work: dict[Any, DeviceWork] = {}
        self._is_by_flash = False

    @cached_property
    def slots(self) -> torch.Tensor:
        return torch.from_numpy(self.host_slots).to(self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        return torch.from_numpy(self.host_positions).to(self.device)

    @property
    def is_by_kernel(self) -> bool:
        """Whether a kernel for a GPU computed some of it."""
        return bool(self._work) or self._is_by_flash

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token, its newest."""
        return len(self.feeds) == self._starts[-1] and all(feed.picks is None for feed in self.feeds)

    def seen_keys(self, *, own_multiple: int = 1) -> list[SeenKeys]:
        """Which keys its queries see, those of several sequences together where they share them.

        Own stretches are lengthened to a multiple of `own_multiple`, by keys behind the newest token: nobody
        sees those.
        """
        ranges: dict[tuple[int, int], list[Stretch]] = {}
        for keys, first, last in self._shared:
            ranges.setdefault((first, last), []).append(keys)
        for feed, first, last in zip(self.feeds, self._starts, self._starts[1:], strict=False):
            start, length, position = feed.own
            own = Stretch(start, -(-length // own_multiple) * own_multiple, position)
            ranges.setdefault((first, last), []).append(own)
        return [SeenKeys(first, last, seen) for (first, last), seen in ranges.items()]

    def _of_each(self, base: Callable[[Stretch], int]) -> np.ndarray:
        """Per new token, its index in its sequence's own stretch, plus `base` of that stretch."""
        if self.is_decode:
            return np.array([feed.own.length - 1 + base(feed.own) for feed in self.feeds], dtype=np.int64)
        return np.concatenate([feed.indices + base(feed.own) for feed in self.feeds])

    def _shared_keys(self) -> Iterator[_SharedKeys]:
        """Shared stretches, each with a range of adjacent queries that see it."""
        open_ranges: dict[Stretch, int] = {}
        for index, feed in enumerate((*self.feeds, None)):
            seen = set(feed.before) if feed is not None else set()
            for keys in [keys for keys in open_ranges if keys not in seen]:
                yield _SharedKeys(keys, open_ranges.pop(keys), self._starts[index])
            for keys in seen:
                open_ranges.setdefault(keys, self._starts[index])

    @cached_property
    def _lanes(self) -> tuple[_Lanes, ...]:
        """Feeds of one token each, gathered where their KV allows it; the queries may lie anywhere."""
        single = [index for index, feed in enumerate(self.feeds) if feed.tokens == 1 and feed.picks is None]
        parts: list[_Lanes] = []
        for index in sorted(single, key=lambda index: self.feeds[index].own.start):
            query, feed = self._starts[index], self.feeds[index]
            if parts and (joined := parts[-1].joined_by(query, feed)):
                parts[-1] = joined
            else:
                parts.append(_Lanes((query,), 0, (feed.own,), feed.room))
        return tuple(parts)

    @cached_property
    def _lane_queries(self) -> tuple[slice | torch.Tensor, ...]:
        """The queries of each of these, as an index: a slice where they are adjacent."""
        found: list[slice | torch.Tensor] = []
        for lanes in self._lanes:
            first, last = lanes.queries[0], lanes.queries[-1] + 1
            if lanes.queries == tuple(range(first, last)):
                found.append(slice(first, last))
            else:
                found.append(torch.tensor(lanes.queries, device=self.device))
        return tuple(found)

    # --- what the model calls ----------------------------------------------------------------

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention of `[1, heads, n, head_dim]` over slots `[1, kv_heads, slots, head_dim]`.

        Returns `[1, n, heads, head_dim]`. The call's mask is ignored.
        """
        on_gpu = positional.is_on_gpu(call, self.device) and not positional.why_not(call)
        window = self._windows[call.module]
        is_long = self._is_long_prefill and window is None and call.is_plain
        if on_gpu and is_long and takes_flash(call.query, call.value):
            self._is_by_flash = True
        elif on_gpu:
            return observing.attend(call, self._device_work(call), window, self._observed)
        if self._observed is not None:
            raise UnsupportedModelError("a layer's attention cannot be observed")
        layer = _Layer(call, window)
        if not call.is_plain:
            return self._one_by_one(call, layer)
        for index, feed in enumerate(self.feeds):
            if feed.picks is not None:
                self._attend_picks(index, feed.own, feed.picks, layer)
            elif feed.tokens > 1:
                self._attend_own(index, layer)
        for lanes, queries in zip(self._lanes, self._lane_queries, strict=True):
            self._attend_lanes(lanes, queries, layer)
        for keys, first, last in self._shared:
            self._add_shared(keys, first, last, layer)
        return layer.out.transpose(0, 1).unsqueeze(0).to(call.query.dtype)

    @cached_property
    def _is_long_prefill(self) -> bool:
        """Whether some sequences have many new tokens and others one, and nobody observes them."""
        tokens = [feed.tokens for feed in self.feeds]
        return (
            self._observed is None
            and max(tokens) >= _FLASH_QUERIES
            and len(tokens) <= _FLASH_FEEDS
            and all(count == 1 or count >= _FLASH_QUERIES for count in tokens)
            and all(feed.picks is None and feed.first in (0, feed.own.length - 1) for feed in self.feeds)
        )

    def _device_work(self, call: AttentionCall) -> DeviceWork:
        """The tables for the kernel, made once for all layers of a shape."""
        heads, kv_heads, value_dim = call.query.shape[1], call.key.shape[1], call.value.shape[3]
        made_for = (heads, kv_heads, call.query.shape[3], value_dim, call.query.dtype)
        if made_for not in self._work:
            tokens = len(self.host_positions)
            tile = positional.tile_of(call.group, call.query.shape[3], call.query.dtype, tokens)
            work = work_of(
                self.seen_keys(),
                self.host_positions,
                group=call.group,
                kv_heads=kv_heads,
                tile=tile,
                all_in_parts=self._observed is not None,
            )
            self._work[made_for] = DeviceWork.of(work, self.positions, heads, value_dim, tile)
        return self._work[made_for]

    def _attend_own(self, index: int, layer: _Layer) -> None:
        """A sequence's new tokens over its own stretch."""
        feed = self.feeds[index]
        first, last = self._starts[index], self._starts[index + 1]
        query, (key, value) = layer.query[:, :, first:last], layer.slots(feed.own.start, feed.own.length)
        if feed.first == 0 and (layer.window is None or feed.own.length <= layer.window):
            layer.set(first, last, *partial_attention(query, key, value, None, layer.scale, causal=True))
            return
        for start, end in _blocks(0, feed.tokens):
            self._attend_block(feed.own, first + start, start, end, layer)

    def _attend_picks(self, index: int, own: Stretch, picks: np.ndarray, layer: _Layer) -> None:
        """Tokens between others of a sequence's own stretch; each block reads it up to its own last one."""
        for start, end in _blocks(0, len(picks), _PICKED_QUERIES):
            first, last = self._starts[index] + start, self._starts[index] + end
            there = np.arange(int(picks[end - 1]) + 1)
            seen = partial(_visible, picks[start:end], there, layer.window)
            mask = self._mask(("picks", first), layer, seen)
            key, value = layer.slots(own.start, len(there))
            part = partial_attention(layer.folded(first, last), key, value, mask, layer.scale)
            layer.set(first, last, *part)

    def _attend_block(self, own: Stretch, first: int, start: int, end: int, layer: _Layer) -> None:
        """Tokens `[start, end)` of a stretch longer than the window, the first of them query `first`."""
        assert layer.window is not None
        seen_from = max(0, start - layer.window + 1)
        key, value = layer.slots(own.start + seen_from, end - seen_from)
        positions, there = np.arange(start, end), np.arange(seen_from, end)
        mask = self._mask(("own", first), layer, partial(_visible, positions, there, layer.window))
        last = first + end - start
        layer.set(first, last, *partial_attention(layer.folded(first, last), key, value, mask, layer.scale))

    def _attend_lanes(self, lanes: _Lanes, queries: slice | torch.Tensor, layer: _Layer) -> None:
        """One token of each of several sequences over their own stretches, in one call."""
        count = len(lanes.owns)
        longest = max(own.length for own in lanes.owns)

        def seen() -> np.ndarray:
            index, ends = np.arange(longest), np.array([own.length for own in lanes.owns])[:, None]
            visible = index < ends
            return visible if layer.window is None else visible & (index >= ends - layer.window)

        start = lanes.owns[0].start
        mask = self._mask(("lanes", start), layer, seen, group=1)
        part, sums = partial_attention(
            layer.query[0, :, queries].transpose(0, 1).reshape(count, layer.key.shape[1], layer.group, -1),
            _strided(layer.key, start, count, lanes.step, longest),
            _strided(layer.value, start, count, lanes.step, longest),
            None if mask is None else mask.reshape(count, 1, 1, longest),
            layer.scale,
        )
        layer.out[:, queries] = part.flatten(1, 2).transpose(0, 1).float()
        layer.weight[:, queries] = sums.flatten(1, 2).transpose(0, 1).float()

    def _add_shared(self, keys: Stretch, first: int, last: int, layer: _Layer) -> None:
        """Queries `[first, last)` over a stretch that they share, added to what they have."""
        if layer.window is None:
            parts = partial_attention(
                layer.folded(first, last), *layer.slots(keys.start, keys.length), None, layer.scale
            )
            layer.add(first, last, *parts)
            return
        for start, end in _blocks(first, last):
            self._add_within_window(keys, start, end, layer, layer.window)

    def _add_within_window(self, keys: Stretch, first: int, last: int, layer: _Layer, window: int) -> None:
        """The same for few queries, of which some may not see all of it."""
        positions = self.host_positions[first:last]
        skipped = max(0, int(positions.min()) - window + 1 - keys.position)
        if skipped >= keys.length:
            return  # out of sight of them all
        mask = None
        if int(positions.max()) - window >= keys.position + skipped:
            there = keys.position + np.arange(skipped, keys.length)
            mask = self._mask((keys, first), layer, partial(_visible, positions, there, window))
        key, value = layer.slots(keys.start + skipped, keys.length - skipped)
        layer.add(first, last, *partial_attention(layer.folded(first, last), key, value, mask, layer.scale))

    def _mask(
        self, name: Any, layer: _Layer, seen: Callable[[], np.ndarray], *, group: int | None = None
    ) -> torch.Tensor | None:
        """The additive mask `[1, 1, group * n, keys]` of `seen` `[n, keys]`; None where all is seen.

        It is made once and shared by the layers.
        """
        query, group = layer.query, layer.group if group is None else group
        made_for = (name, layer.window, group, query.dtype, query.device)
        if made_for not in self._masks:
            visible = seen()
            mask = torch.zeros(visible.shape, dtype=query.dtype)
            mask.masked_fill_(torch.from_numpy(~visible), torch.finfo(query.dtype).min)
            mask = mask.repeat(group, 1)[None, None].to(query.device)
            self._masks[made_for] = None if visible.all() else mask
        return self._masks[made_for]

    def _one_by_one(self, call: AttentionCall, layer: _Layer) -> torch.Tensor:
        """The model's own attention, sequence by sequence, with the KV of each copied together for it."""
        results = []
        for index, feed in enumerate(self.feeds):
            first, last = self._starts[index], self._starts[index + 1]
            parts = (*feed.before, feed.own._replace(length=int(feed.indices[-1]) + 1))
            there = np.concatenate([keys.position + np.arange(keys.length) for keys in parts])
            positions = self.host_positions[first:last]
            seen = partial(_visible, positions, there, layer.window)
            mask = self._mask(("sequence", index), layer, seen, group=1)
            if mask is None:
                mask = layer.query.new_zeros(1, 1, last - first, len(there))
            pairs = [layer.slots(keys.start, keys.length) for keys in parts]
            keys, values = (torch.cat(tensors, dim=2) for tensors in zip(*pairs, strict=True))
            query = layer.query[:, :, first:last]
            alone = replace(call, query=query, key=keys, value=values, mask=mask, is_causal=False)
            results.append(model_attention(alone))
        return torch.cat(results, dim=1)


class _Layer:
    """One layer's attention: what comes in, and the result so far with the weight that it has."""

    def __init__(self, call: AttentionCall, window: int | None) -> None:
        query, value = call.query, call.value
        self.query, self.key, self.value = query, call.key, value
        self.scale = call.scale
        self.window = window
        self.group = call.group
        self.out = query.new_empty(query.shape[1], query.shape[2], value.shape[3], dtype=torch.float32)
        self.weight = query.new_empty(query.shape[1], query.shape[2], dtype=torch.float32)

    def slots(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[1, kv_heads, length, head_dim]` from slot `start` on."""
        return self.key[:, :, start : start + length], self.value[:, :, start : start + length]

    def folded(self, first: int, last: int) -> torch.Tensor:
        """Queries with the groups in the query axis: `[1, kv_heads, group * (last - first), head_dim]`."""
        return self.query[:, :, first:last].reshape(1, self.key.shape[1], -1, self.query.shape[3])

    def set(self, first: int, last: int, part: torch.Tensor, sums: torch.Tensor) -> None:
        """The first part of queries `[first, last)`."""
        self.out[:, first:last] = part.reshape(len(self.out), last - first, -1)
        self.weight[:, first:last] = sums.reshape(len(self.out), last - first)

    def add(self, first: int, last: int, part: torch.Tensor, sums: torch.Tensor) -> None:
        """A further part of them, over other keys."""
        part = part.reshape(len(self.out), last - first, -1)
        sums = sums.reshape(len(self.out), last - first)
        merge(self.out[:, first:last], self.weight[:, first:last], part, sums)


def _blocks(start: int, end: int, size: int = _WINDOW_QUERIES) -> Iterator[tuple[int, int]]:
    """Stretches of queries whose masks stay small."""
    for first in range(start, end, size):
        yield first, min(end, first + size)


def _strided(slots: torch.Tensor, start: int, count: int, step: int, length: int) -> torch.Tensor:
    """Views `[count, kv_heads, length, head_dim]` of `[1, kv_heads, slots, head_dim]`, every `step` slots."""
    _, heads, _, dim = slots.shape
    _, head_stride, slot_stride, dim_stride = slots.stride()
    return slots[:, :, start:].as_strided(
        (count, heads, length, dim), (step * slot_stride, head_stride, slot_stride, dim_stride)
    )


def _visible(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    """`[n, keys]`: which keys at positions `keys` each query at its own position sees."""
    seen = keys <= queries[:, None]
    if window is not None:
        seen &= keys > queries[:, None] - window
    return np.asarray(seen)
