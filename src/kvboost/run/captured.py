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
from kvboost.kernels import observing, positional
from kvboost.kernels.packed import PackedAttention
from kvboost.kernels.scope import AttentionCall, forward_scope
from kvboost.kernels.windows import windows_of
from kvboost.kernels.work import LEAST_SPLIT, SeenKeys, Work, work_of
from kvboost.kv.arena import Arena
from kvboost.run.step_tables import TOKENS, LayerShape, Size, StepTables, part_buffers

_MOST_BYTES = 2 << 30  # of all graphs
_OFTEN = 2  # a size is captured that so many steps have missed
_MOST_DOUBLED = 6
_OWN_MULTIPLE = 64  # keys
_COARSER = (1, 4, 16)  # times the least keys of an item: of many queries, fewer parts fit the tables
_TOLERANCE = 2e-2  # between a forward and its replay, of the norm of the logits


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
        self._shapes: tuple[LayerShape, ...] = ()
        self._graphs: dict[Size, _Graph] = {}
        self._wanted: Counter[Size] = Counter()
        self._pool: Any = None
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._refusal: str | None = None  # None: not tried yet
        self._graph_bytes = 0
        self._drops = 0
        self._last_works: tuple[StepTables, list[SeenKeys], dict[LayerShape, Work]] | None = None
        self._keeps = True  # the model gives the logits that are asked for, and no others
        self.counts = CaptureCounts()

    @property
    def why_not(self) -> str:
        """Why steps are not captured; empty if they are, or were not tried yet."""
        return self._refusal or ""

    @property
    def nbytes(self) -> int:
        """Memory of the graphs and their tables."""
        parts = sum(each.nbytes for each in self._parts) if self._parts is not None else 0
        return self._graph_bytes + parts + sum(each.tables.nbytes for each in list(self._graphs.values()))

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
        graph = self._replayed(Size.holding(len(token_ids), len(keep)), state, attention, token_ids, keep)
        return (graph.logits[: len(keep)], graph.largest[: len(keep)]) if graph is not None else None

    def observe(
        self, state: Hashable, attention: PackedAttention, token_ids: np.ndarray, blocks: np.ndarray
    ) -> torch.Tensor | None:
        """How much attention is paid to the keys in `blocks` `[n, 3]`, `[2, positions]`, until the next step.

        None: there is no graph for it.
        """
        size = Size.holding(len(token_ids), 1, observed=True)
        last = np.array([len(token_ids) - 1])
        graph = self._replayed(size, state, attention, token_ids, last, blocks)
        return graph.tables.observed.scores if graph is not None and graph.tables.observed else None

    def _replayed(
        self,
        size: Size | None,
        state: Hashable,
        attention: PackedAttention,
        token_ids: np.ndarray,
        keep: np.ndarray,
        blocks: np.ndarray | None = None,
    ) -> _Graph | None:
        """The graph of a size, once it has run a step; None where there is none, or it has no room."""
        self._check(state)
        if size is None or self._refusal:
            return None
        graph = self._graphs.get(size)
        if graph is None:
            self._wanted[size] += 1
            self.counts.missed_steps += 1
            return None
        works = self._works_of(attention, graph.tables)
        if works is None or (blocks is not None and not graph.tables.holds_blocks(blocks)):
            self.counts.missed_steps += 1
            return None
        graph.tables.fill(attention, token_ids, keep, works, blocks)
        graph.graph.replay()
        self.counts.replayed_steps += 1
        return graph

    def _works_of(self, attention: PackedAttention, tables: StepTables) -> dict[LayerShape, Work] | None:
        """The work of a step by the shape of layers; None where it is too much for the tables.

        While sequences decode, it is the same from step to step, but for positions: the last keys of each are
        in it before they are seen.
        """
        seen, positions = attention.seen_keys(), attention.host_positions
        if attention.is_decode:
            seen = attention.seen_keys(own_multiple=_OWN_MULTIPLE)
            if self._last_works is not None and self._last_works[:2] == (tables, seen):
                return self._last_works[2]
            positions = positions + _OWN_MULTIPLE  # as far as anything reaches
        found: dict[LayerShape, Work] = {}
        for shape in self._shapes:
            cuts = (
                work_of(
                    seen,
                    positions,
                    group=shape.group,
                    kv_heads=shape.kv_heads,
                    tile=shape.tile,
                    all_in_parts=True,
                    least_split=times * LEAST_SPLIT,
                )
                for times in _COARSER
            )
            cut = next((each for each in cuts if tables.holds(shape, each)), None)
            if cut is None:
                return None
            found[shape] = cut
        self._last_works = (tables, seen, found) if attention.is_decode else None
        return found

    def capture(self, state: Hashable, sizes: list[Size] | None = None) -> None:
        """Capture what steps have missed, or `sizes`. Not to be called while anybody waits for a token."""
        self._check(state)
        for size in self.missing(sizes):
            if self._refusal:
                return
            del self._wanted[size]
            if size not in self._graphs and self._graph_bytes < _MOST_BYTES:
                try:
                    self._capture(size)
                except Exception as error:  # whatever a model does that a graph cannot hold
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    self.drop(f"capturing failed: {lines[0][:200]}")

    def missing(self, sizes: list[Size] | None = None) -> list[Size]:
        """Those of `sizes` that are not captured; by default those that steps have missed often.

        The more often graphs were dropped, the more often: a model that is switched to and fro gains nothing.
        """
        often = _OFTEN << min(self._drops, _MOST_DOUBLED)
        missed = [size for size, times in self._wanted.most_common() if times >= often]
        return [size for size in (missed if sizes is None else sizes) if size not in self._graphs]

    def drop(self, why: str | None = None) -> None:
        """Forget all graphs; `why` says why none will be made until the model changes."""
        self.counts.dropped += len(self._graphs)
        self._drops += bool(self._graphs)
        self._wanted.clear()
        self._last_works = None
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
                self._parts = part_buffers(self._shapes, device)
            assert self._parts is not None
            tables = StepTables(
                size,
                self._shapes,
                self._spare_slot,
                self._parts,
                self._arena.slabs[0],
                self._arena.capacity,
            )
            attention = _StaticAttention(tables, windows_of(self._model).by_module)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):  # kernels are made and libraries set up before
                for _ in range(2):
                    eager = self._forward(tables, attention)
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # capturing begins with this
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
        tables = StepTables(Size(2, 1), (), self._spare_slot, None, self._arena.slabs[0])
        try:
            self._keeps = len(self._all_logits(tables, recorder)) == 1
        except UnsupportedModelError as error:
            return str(error)
        if recorder.refusal or not recorder.shapes:
            return recorder.refusal or "no layer calls transformers' attention interface"
        tensors = [*self._model.parameters(), *self._model.buffers()]
        if before != (places_of(tensors), versions_of(tensors)):
            return "its forward changes its own buffers"
        self._shapes = tuple(sorted(recorder.shapes))
        return ""

    def _forward(self, tables: StepTables, attention: Any) -> torch.Tensor:
        """Logits `[logits, vocab]` of the step that the tables hold."""
        if tables.observed is not None:
            tables.observed.scores.zero_()
        logits = self._all_logits(tables, attention)
        return logits if self._keeps else logits[tables.keep]

    def _all_logits(self, tables: StepTables, attention: Any) -> torch.Tensor:
        """The logits `[n, vocab]` that the model gives."""
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
        return logits


class _ShapeRecorder:
    """A backend that notes the shapes of layers, and why the kernel cannot run one."""

    def __init__(self) -> None:
        self.shapes: set[LayerShape] = set()
        self.refusal = ""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Zeros `[1, n, heads, head_dim]`."""
        self.refusal = self.refusal or positional.why_not(call)
        head_dim, value_dim = call.query.shape[3], call.value.shape[3]
        tile = positional.tile_of(call.group, head_dim, call.query.dtype, TOKENS[0])
        self.shapes.add(LayerShape(call.group, call.key.shape[1], head_dim, value_dim, tile))
        return call.query.new_zeros(1, call.query.shape[2], call.query.shape[1], value_dim)


class _StaticAttention:
    """The backend of a captured forward."""

    def __init__(self, tables: StepTables, windows: Mapping[torch.nn.Module, int | None]) -> None:
        self._tables = tables
        self._windows = windows

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention `[1, n, heads, head_dim]`."""
        head_dim, value_dim = call.query.shape[3], call.value.shape[3]
        tile = positional.tile_of(call.group, head_dim, call.query.dtype, TOKENS[0])
        shape = LayerShape(call.group, call.key.shape[1], head_dim, value_dim, tile)
        work, window = self._tables.works[shape], self._windows[call.module]
        return observing.attend(call, work, window, self._tables.observed)


class _Graph(NamedTuple):
    graph: Any
    tables: StepTables
    logits: torch.Tensor
    largest: torch.Tensor
