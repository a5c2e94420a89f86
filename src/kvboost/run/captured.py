"""Captured steps: packed forwards of a GPU that are launched as one CUDA graph.

Below some hundred tokens a forward costs what its launches cost, whatever they compute. A graph launches
them at once. It is captured for a size, a bucket of tokens and of logits, and serves every step that fits:
token ids, positions, slots and the work of attention are tables that it reads on the device. **A graph holds
pointers**: graphs are dropped as soon as the model's state or the place of any of its tensors or of the arena
is another one. What cannot be captured runs eagerly, and `why_not` says why. Knows models and arenas, no
sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvboost.errors import UnsupportedModelError
from kvboost.identity.weights import places_of, versions_of
from kvboost.kernels import positional, work
from kvboost.kernels.packed import PackedAttention
from kvboost.kernels.positional import DeviceWork
from kvboost.kernels.scope import AttentionCall, forward_scope
from kvboost.kernels.windows import windows_of
from kvboost.kernels.work import ITEM_FIELDS, RANGE_FIELDS, Tile, Work, work_of
from kvboost.kv.arena import Arena

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MOST_LOGITS = 64
_MOST_PARTS = 4_096  # of queries in one step; each takes the size of an output in float32
_RANGES_PER_TOKEN = 8
_MOST_BYTES = 2 << 30  # of all graphs
_OFTEN = 2  # a size is captured that so many steps have missed
_TOLERANCE = 2e-2  # between a forward and its replay, of the norm of the logits


class Size(NamedTuple):
    """Of a captured step: tokens that go through, and logits that come out."""

    tokens: int
    logits: int

    @classmethod
    def all(cls, sequences: int) -> list[Size]:
        """Sizes for every step of at most so many sequences."""
        single = [cls(tokens, 1) for tokens in _TOKENS]
        most = max(min(sequences, _MOST_LOGITS), 1)
        several = [cls(tokens, min(tokens, _MOST_LOGITS)) for tokens in _TOKENS if tokens > 1]
        return single + [size for size in several if most > 1 and size.logits < 2 * most]

    @classmethod
    def holding(cls, tokens: int, logits: int) -> Size | None:
        """The smallest for so many; None where they are too many."""
        fitting = next((each for each in _TOKENS if each >= tokens), None)
        if fitting is None or logits > _MOST_LOGITS:
            return None
        return cls(fitting, 1 if logits <= 1 else min(fitting, _MOST_LOGITS))


@dataclass
class CaptureCounts:
    """Steps that were replayed, steps that would have fitted a graph that was not there, and captures."""

    replayed_steps: int = 0
    missed_steps: int = 0
    captures: int = 0
    dropped: int = 0


class CapturedSteps:
    """The graphs of one model over one arena, whose slot `spare_slot` belongs to nobody.

    The caller holds the model's lock, and says with every step in which `state` the model is.
    """

    def __init__(self, model: Any, arena: Arena, spare_slot: int) -> None:
        self._model = model
        self._arena = arena
        self._spare_slot = spare_slot
        self._valid_for: Hashable = None
        self._shapes: tuple[_Shape, ...] = ()
        self._graphs: dict[Size, _Graph] = {}
        self._wanted: Counter[Size] = Counter()
        self._pool: Any = None
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._refusal: str | None = None  # None: not tried yet
        self._graph_bytes = 0
        self.counts = CaptureCounts()

    @property
    def why_not(self) -> str:
        """Why steps are not captured; empty if they are, or were not tried yet."""
        return self._refusal or ""

    @property
    def nbytes(self) -> int:
        """Memory of the graphs and their tables."""
        parts = sum(each.nbytes for each in self._parts) if self._parts is not None else 0
        return self._graph_bytes + parts + sum(each.tables.nbytes for each in self._graphs.values())

    @property
    def sizes(self) -> list[Size]:
        """Sizes of the graphs."""
        return sorted(self._graphs)

    def run(
        self, state: Hashable, attention: PackedAttention, token_ids: np.ndarray, keep: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits `[n, vocab]` of queries `keep` `[n]`, and the index `[n]` of the largest of each.

        They are good until the next step. None: there is no graph for it.
        """
        self._check(state)
        size = Size.holding(len(token_ids), len(keep))
        if size is None or self._refusal:
            return None
        graph = self._graphs.get(size)
        if graph is None:
            self._wanted[size] += 1
            self.counts.missed_steps += 1
            return None
        works = self._works_of(attention, graph.tables)
        if works is None:
            self.counts.missed_steps += 1
            return None
        graph.tables.fill(attention, token_ids, keep, works)
        graph.graph.replay()
        self.counts.replayed_steps += 1
        return graph.logits[: len(keep)], graph.largest[: len(keep)]

    def _works_of(self, attention: PackedAttention, tables: _Tables) -> dict[_Shape, Work] | None:
        """The work of a step by the shape of layers; None where it is too much for the tables."""
        seen, found = attention.seen_keys(), {}
        for shape in self._shapes:
            cut = work_of(
                seen,
                attention.host_positions,
                group=shape.group,
                kv_heads=shape.kv_heads,
                tile=shape.tile,
                all_in_parts=True,
            )
            if not tables.holds(shape, cut):
                return None
            found[shape] = cut
        return found

    def capture(self, state: Hashable, sizes: list[Size] | None = None) -> None:
        """Capture what steps have missed, or `sizes`. Not to be called while anybody waits for a token."""
        self._check(state)
        missed = [size for size, times in self._wanted.most_common() if times >= _OFTEN]
        for size in missed if sizes is None else sizes:
            if self._refusal:
                return
            del self._wanted[size]
            if size not in self._graphs and self._graph_bytes < _MOST_BYTES:
                try:
                    self._capture(size)
                except Exception as error:  # whatever a model does that a graph cannot hold
                    self.drop(f"capturing failed: {str(error).strip().splitlines()[0][:200]}")

    def drop(self, why: str | None = None) -> None:
        """Forget all graphs; `why` says why none will be made until the model changes."""
        self.counts.dropped += len(self._graphs)
        self._graphs, self._pool, self._parts, self._graph_bytes = {}, None, None, 0
        self._refusal = why

    def _check(self, state: Hashable) -> None:
        """Drop all graphs where the model or the arena is not as they were captured."""
        now = (state, *(slab.data_ptr() for slab in self._arena.slabs))
        if now != self._valid_for:
            self.drop()
            self._valid_for = now

    # --- capturing ---------------------------------------------------------------------------

    def _capture(self, size: Size) -> None:
        device = self._arena.slabs[0].device
        with torch.cuda.device(device), torch.no_grad():
            if self._refusal is None:
                self._refusal = self._why_not(device)
                if self._refusal:
                    return
                self._parts = _part_buffers(self._shapes, device)
            assert self._parts is not None
            tables = _Tables(size, self._shapes, self._spare_slot, self._parts, self._arena.slabs[0])
            attention = _StaticAttention(tables, windows_of(self._model).by_module)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):  # kernels are made and libraries set up before
                for _ in range(2):
                    eager = self._forward(tables, attention)
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_reserved(device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._forward(tables, attention)
                largest = logits.argmax(-1)
            graph.replay()
            self._graph_bytes += max(0, torch.cuda.memory_reserved(device) - before)
            apart = (logits.float() - eager.float()).norm() / eager.float().norm().clamp_min(1e-6)
            if not float(apart) <= _TOLERANCE:
                self.drop(f"a replay gives other logits than its forward: off by {float(apart):.2g}")
                return
            self._graphs[size] = _Graph(graph, tables, logits, largest)
            self.counts.captures += 1

    def _why_not(self, device: torch.device) -> str:
        """Why no step of this model can be captured; notes the shapes of its layers."""
        if device.type != "cuda" or not positional.is_available():
            return "Triton is missing" if device.type == "cuda" else "no GPU"
        for name, module in self._model.named_modules():
            if "_hf_hook" in vars(module):
                return f"{name or type(module).__name__} is moved between devices by hooks"
        tensors = [*self._model.parameters(), *self._model.buffers()]
        if any(each.device != device for each in tensors) or any(
            slab.device != device for slab in self._arena.slabs
        ):
            return "the model is on several devices"
        before = places_of(tensors), versions_of(tensors)
        recorder = _ShapeRecorder()
        tables = _Tables(Size(1, 1), (), self._spare_slot, None, self._arena.slabs[0])
        try:
            self._forward(tables, recorder)
        except UnsupportedModelError as error:
            return str(error)
        if recorder.refusal or not recorder.shapes:
            return recorder.refusal or "no layer calls transformers' attention interface"
        tensors = [*self._model.parameters(), *self._model.buffers()]
        if before != (places_of(tensors), versions_of(tensors)):
            return "its forward changes its own buffers"
        self._shapes = tuple(sorted(recorder.shapes))
        return ""

    def _forward(self, tables: _Tables, attention: Any) -> torch.Tensor:
        """Logits `[logits, vocab]` of the step that the tables hold."""
        arena = self._arena
        arena.set_length(arena.capacity)
        with arena.scatter_at(tables.slots), forward_scope(self._model, attention):
            output = self._model(
                input_ids=tables.token_ids.unsqueeze(0),
                position_ids=tables.positions.unsqueeze(0),
                attention_mask=tables.mask,
                past_key_values=arena,
                use_cache=True,
                logits_to_keep=tables.keep,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if len(logits) == len(tables.keep) else logits[tables.keep]


class _Shape(NamedTuple):
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


class _ShapeRecorder:
    """A backend that notes the shapes of layers, and why the kernel cannot run one."""

    def __init__(self) -> None:
        self.shapes: set[_Shape] = set()
        self.refusal = ""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Zeros `[1, n, heads, head_dim]`."""
        self.refusal = self.refusal or positional.why_not(call)
        head_dim, value_dim = call.query.shape[3], call.value.shape[3]
        tile = positional.tile_of(call.group, head_dim, call.query.dtype, _TOKENS[0])
        self.shapes.add(_Shape(call.group, call.key.shape[1], head_dim, value_dim, tile))
        return call.query.new_zeros(1, call.query.shape[2], call.query.shape[1], value_dim)


class _StaticAttention:
    """The backend of a captured forward."""

    def __init__(self, tables: _Tables, windows: Mapping[torch.nn.Module, int | None]) -> None:
        self._tables = tables
        self._windows = windows

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention `[1, n, heads, head_dim]`."""
        head_dim, value_dim = call.query.shape[3], call.value.shape[3]
        tile = positional.tile_of(call.group, head_dim, call.query.dtype, _TOKENS[0])
        shape = _Shape(call.group, call.key.shape[1], head_dim, value_dim, tile)
        return positional.attend(call, self._tables.works[shape], self._windows[call.module])


class _Graph(NamedTuple):
    graph: Any
    tables: _Tables
    logits: torch.Tensor
    largest: torch.Tensor


class _Tables:
    """All that a captured step reads, in one piece of memory on the device and its twin on the host.

    A token that is not there is token 0 at position 0, sees nothing, and its KV goes to the spare slot.
    """

    def __init__(
        self,
        size: Size,
        shapes: tuple[_Shape, ...],
        spare_slot: int,
        parts: tuple[torch.Tensor, torch.Tensor] | None,
        like: torch.Tensor,
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

    @property
    def nbytes(self) -> int:
        return int(self._device.nbytes)

    def holds(self, shape: _Shape, cut: Work) -> bool:
        """Whether there is room for the work of a step."""
        each = (
            ("narrow", cut.narrow),
            ("wide", cut.wide),
            ("ranges", cut.ranges),
            ("part_rows", cut.part_rows),
        )
        return all(len(table) <= len(self._fields[shape, name]) for name, table in each)

    def fill(
        self,
        attention: PackedAttention,
        token_ids: np.ndarray,
        keep: np.ndarray,
        works: Mapping[_Shape, Work],
    ) -> None:
        """Take the tables of a step, which must have room."""
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
        for shape, cut in works.items():
            for name, table in (("narrow", cut.narrow), ("wide", cut.wide)):
                self._fields[shape, name][: len(table)] = table
                self._fields[shape, name][len(table) :, 1] = 0  # no queries
            self._fields[shape, "ranges"][: len(cut.ranges)] = cut.ranges
            self._fields[shape, "part_rows"][: cut.parts] = cut.part_rows
            ends = self._fields[shape, "part_ends"]
            ends[: tokens + 1], ends[tokens + 1 :] = cut.part_ends, cut.part_ends[-1]
        self._device.copy_(self._host, non_blocking=True)
        self._copied.record()


def _part_buffers(shapes: tuple[_Shape, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the parts of any shape."""
    heads = max(shape.heads for shape in shapes)
    outputs = max(shape.heads * shape.value_dim for shape in shapes)
    made = torch.zeros(_MOST_PARTS * outputs, dtype=torch.float32, device=device)
    return made, torch.zeros(_MOST_PARTS * heads * 2, dtype=torch.float32, device=device)


def _views(
    parts: tuple[torch.Tensor, torch.Tensor] | None, shape: _Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    assert parts is not None
    outputs, sums = _MOST_PARTS * shape.heads * shape.value_dim, _MOST_PARTS * shape.heads * 2
    return (
        parts[0][:outputs].view(_MOST_PARTS, shape.heads, shape.value_dim),
        parts[1][:sums].view(_MOST_PARTS, shape.heads, 2),
    )
