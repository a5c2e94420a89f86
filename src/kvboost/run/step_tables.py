"""The tables of captured steps: all that a graph reads, in one piece of memory on the device.

Knows sizes and shapes of steps, no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from kvboost.kernels import observing, work
from kvboost.kernels.observing import Observed
from kvboost.kernels.packed import PackedAttention
from kvboost.kernels.positional import DeviceWork
from kvboost.kernels.work import ITEM_FIELDS, RANGE_FIELDS, Tile, Work

_SMALL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Launching a forward takes as long as computing some 1,500 tokens. Up there padding costs: sizes lie closer.
TOKENS = (*_SMALL, *range(640, 1537, 128))
_MOST_LOGITS = 64
_MOST_OBSERVED = 32  # tokens whose attention is observed
_BROKEN_BLOCKS = 512  # of keys, beside those that are full
_MOST_PARTS = 4_096  # of queries in one step; each takes the size of an output in float32
_RANGES_PER_TOKEN = 8


class Size(NamedTuple):
    """Of a captured step: tokens that go through, and logits that come out."""

    tokens: int
    logits: int
    observed: bool = False  # attention of its tokens to all others is added up

    @classmethod
    def all(cls, sequences: int) -> list[Size]:
        """Sizes for every step of at most so many sequences, but for large ones: these, when they come."""
        single = [cls(tokens, 1) for tokens in _SMALL]
        most = max(min(sequences, _MOST_LOGITS), 1)
        several = [cls(tokens, min(tokens, _MOST_LOGITS)) for tokens in _SMALL if tokens > 1]
        return single + [size for size in several if most > 1 and size.logits < 2 * most]

    @classmethod
    def holding(cls, tokens: int, logits: int, *, observed: bool = False) -> Size | None:
        """The smallest for so many; None where they are too many."""
        fitting = next((each for each in TOKENS if each >= tokens), None)
        if fitting is None or logits > _MOST_LOGITS or (fitting > _SMALL[-1] and logits > 1):
            return None  # large steps of several sequences are hardly ever alike
        if observed:
            return cls(fitting, 1, observed) if fitting <= _MOST_OBSERVED else None
        return cls(fitting, 1 if logits <= 1 else min(fitting, _MOST_LOGITS))


class LayerShape(NamedTuple):
    """Of attention layers."""

    group: int
    kv_heads: int
    head_dim: int
    value_dim: int
    tile: Tile

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    def most_items(self, tokens: int) -> tuple[int, int]:
        """Narrow and wide items that a step of so many tokens may have."""
        split = work.most_split(self.kv_heads)
        wide = 0 if tokens * self.group <= self.tile.narrow else split + tokens
        return split + 2 * min(tokens, _MOST_LOGITS), wide


class StepTables:
    """All that a captured step reads, in one piece of memory on the device and its twin on the host.

    A token that is not there is token 0 at position 0, sees nothing, and its KV goes to the spare slot. Of
    attention that is observed, `most_positions` keys are.
    """

    def __init__(
        self,
        size: Size,
        shapes: tuple[LayerShape, ...],
        spare_slot: int,
        parts: tuple[torch.Tensor, torch.Tensor] | None,
        like: torch.Tensor,
        most_positions: int = 0,
    ) -> None:
        device = like.device
        fields: dict[Any, tuple[int, ...]] = {
            "token_ids": (size.tokens,),
            "positions": (size.tokens,),
            "slots": (size.tokens,),
            "keep": (size.logits,),
        }
        for shape in shapes:
            narrow, wide = shape.most_items(size.tokens)
            fields[shape, "narrow"] = (narrow, ITEM_FIELDS)
            fields[shape, "wide"] = (wide, ITEM_FIELDS)
            fields[shape, "ranges"] = (narrow + wide + _RANGES_PER_TOKEN * size.tokens, RANGE_FIELDS)
            fields[shape, "part_ends"] = (size.tokens + 1,)
            fields[shape, "part_rows"] = (_MOST_PARTS,)
        if size.observed:
            fields["blocks"] = (most_positions // observing.KEYS + _BROKEN_BLOCKS, observing.BLOCK_FIELDS)
        sizes = {name: int(np.prod(each)) for name, each in fields.items()}
        total = sum(sizes.values())
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self._fields: dict[Any, np.ndarray] = {}
        on_device: dict[Any, torch.Tensor] = {}
        at = 0
        for name, each in fields.items():
            self._fields[name] = self._host[at : at + sizes[name]].view(each).numpy()
            on_device[name] = self._device[at : at + sizes[name]].view(each)
            at += sizes[name]
        self._spare_slot = spare_slot
        self._filled_with: Mapping[LayerShape, Work] | None = None
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.token_ids, self.positions = on_device["token_ids"], on_device["positions"]
        self.slots, self.keep = on_device["slots"], on_device["keep"]
        self.slots.fill_(spare_slot)
        # Not read by our attention; it keeps the model from making one.
        self.mask = like.new_zeros(1, 1, size.tokens, 1)
        self.works = {
            shape: DeviceWork(
                on_device[shape, "narrow"],
                on_device[shape, "wide"],
                on_device[shape, "ranges"],
                self.positions,
                on_device[shape, "part_ends"],
                on_device[shape, "part_rows"],
                *_views(parts, shape),
                shape.tile,
                fill=True,
            )
            for shape in shapes
        }

        self.observed: Observed | None = None
        if size.observed:
            scores = torch.zeros(2, most_positions, dtype=torch.float32, device=device)
            lse = torch.zeros(size.tokens * max(shape.heads for shape in shapes), device=device)
            self.observed = Observed(on_device["blocks"], scores, lse)

    @property
    def nbytes(self) -> int:
        return int(self._device.nbytes)

    def holds(self, shape: LayerShape, cut: Work) -> bool:
        """Whether there is room for the work of a step."""
        each = (
            ("narrow", cut.narrow),
            ("wide", cut.wide),
            ("ranges", cut.ranges),
            ("part_rows", cut.part_rows),
        )
        return all(len(table) <= len(self._fields[shape, name]) for name, table in each)

    def holds_blocks(self, blocks: np.ndarray) -> bool:
        """Whether there is room for so many blocks of keys, at their positions."""
        if self.observed is None or len(blocks) > len(self._fields["blocks"]):
            return False
        return int((blocks[:, 1] + blocks[:, 2]).max(initial=0)) <= self.observed.scores.shape[1]

    def fill(
        self,
        attention: PackedAttention,
        token_ids: np.ndarray,
        keep: np.ndarray,
        works: Mapping[LayerShape, Work],
        blocks: np.ndarray | None = None,
    ) -> None:
        """Take the tables of a step, which must have room; `blocks` `[n, 3]` of keys are observed."""
        assert self._copied is not None
        self._copied.synchronize()  # the host's memory is read until then
        tokens = len(token_ids)
        for name, values, rest in (
            ("token_ids", token_ids, 0),
            ("positions", attention.host_positions, 0),
            ("slots", attention.host_slots, self._spare_slot),
            ("keep", keep, 0),
        ):
            self._fields[name][: len(values)] = values
            self._fields[name][len(values) :] = rest
        for shape, cut in works.items() if works is not self._filled_with else ():
            for name, table in (("narrow", cut.narrow), ("wide", cut.wide)):
                self._fields[shape, name][: len(table)] = table
                self._fields[shape, name][len(table) :, 1] = 0  # no queries
            self._fields[shape, "ranges"][: len(cut.ranges)] = cut.ranges
            self._fields[shape, "part_rows"][: cut.parts] = cut.part_rows
            ends = self._fields[shape, "part_ends"]
            ends[: tokens + 1], ends[tokens + 1 :] = cut.part_ends, cut.part_ends[-1]
        if blocks is not None:
            self._fields["blocks"][: len(blocks)] = blocks
            self._fields["blocks"][len(blocks) :, 1] = 0
        self._filled_with = works
        self._device.copy_(self._host, non_blocking=True)
        self._copied.record()


def part_buffers(shapes: tuple[LayerShape, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the parts of any shape."""
    heads = max(shape.heads for shape in shapes)
    outputs = max(shape.heads * shape.value_dim for shape in shapes)
    made = torch.zeros(_MOST_PARTS * outputs, dtype=torch.float32, device=device)
    return made, torch.zeros(_MOST_PARTS * heads * 2, dtype=torch.float32, device=device)


def _views(
    parts: tuple[torch.Tensor, torch.Tensor] | None, shape: LayerShape
) -> tuple[torch.Tensor, torch.Tensor]:
    assert parts is not None
    outputs, sums = _MOST_PARTS * shape.heads * shape.value_dim, _MOST_PARTS * shape.heads * 2
    return (
        parts[0][:outputs].view(_MOST_PARTS, shape.heads, shape.value_dim),
        parts[1][:sums].view(_MOST_PARTS, shape.heads, 2),
    )
