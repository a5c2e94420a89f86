"""The parts of one engine, made from its settings, and the questions that every executor asks.

Knows what an engine consists of, not how a request runs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from kvboost.choices import AssemblyMode, GenerationMode
from kvboost.compat import text_config
from kvboost.disk.cache import DiskCache
from kvboost.disk.tiers import open_tier
from kvboost.errors import InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kernels import linears
from kvboost.kv import rope
from kvboost.kv.codec import KVCodec
from kvboost.kv.device_tier import DeviceTier
from kvboost.kv.offload import ring_bytes
from kvboost.kv.pinned import POOL
from kvboost.parts.model_fit import ModelFit, check_model
from kvboost.proof import calibration
from kvboost.proof.calibration import Calibration, bounds_text
from kvboost.remote.byte_store import open_store
from kvboost.remote.cache import RemoteCache, Seen
from kvboost.requests.encoding import check_text
from kvboost.requests.prompts import PromptReader
from kvboost.requests.request import Request, RequestReader
from kvboost.reuse.assembler import Lookup, PromptAssembler
from kvboost.reuse.chunk_loader import ChunkLoader
from kvboost.reuse.chunk_writer import ChunkWriter
from kvboost.reuse.policy import Approximation, Repair
from kvboost.reuse.recorder import Recorder
from kvboost.reuse.workspace import Workspace
from kvboost.run import sampling
from kvboost.settings import EngineSettings
from kvboost.store.chunking import ChunkRegistry, boundary_token_ids
from kvboost.store.manager import KVCacheManager

T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger(__name__)
_FLOPS = {"cpu": 1e11, "cuda": 3e14}  # per second, until prefill was measured
SURPRISE_REASON = "weights had changed unseen"


class ArenaHolder(Protocol):
    """Keeps arenas from one request to the next."""

    @property
    def nbytes(self) -> int: ...

    def drop(self) -> None:
        """Forget their text."""

    def close(self) -> None:
        """Free their memory too."""


class EngineParts:
    """A model, its tokenizer and its cache: what all executors of one engine share."""

    def __init__(self, model: Any, tokenizer: Any, settings: EngineSettings, *, strict: bool) -> None:
        check_text(settings.cache_salt, "cache_salt")
        check_model(model, settings, strict=strict)
        if settings.device is not None:
            model.to(settings.device)
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.bit_exact, self.block = settings.bit_exact, settings.block
        self.disk: DiskCache | None = None
        self.remote: RemoteCache | None = None
        vocab_size = text_config(model).vocab_size
        self.registry = ChunkRegistry(settings.chunk_size, boundary_window=settings.chunk_boundary_window)
        self.manager = KVCacheManager(
            settings.max_chunks,
            settings.max_cache_bytes,
            chunk_size=settings.chunk_size,
            min_run_tokens=self.registry.min_chunk_tokens,
        )
        self.reader = PromptReader(tokenizer, vocab_size)
        self.fit = ModelFit(model, settings, self.forget_all)
        self.layout = self.fit.layout
        self.workspace = Workspace(self.layout)
        self.arena_holders: list[ArenaHolder] = [self.workspace]
        self.approximation = Approximation(model, settings, self.fit.rotation, self.fit.costs)
        self.codec = self._make_codec()
        self.assembler = PromptAssembler(
            self.manager,
            AssemblyMode.PREFIX_ONLY,
            whole_chunks_of=settings.chunk_size if settings.bit_exact else None,
            rotation=self.approximation.rotation,
            sink_tokens=settings.sink_tokens,
            lossy_from=settings.sink_tokens + settings.overlap_k if settings.overlap_k else None,
        )
        self.requests = RequestReader(model, self.reader)
        self.writer = ChunkWriter(
            self.manager,
            self.registry,
            self.codec,
            current=self.fit.namespace,
            stored=self.fit.watch.note_stored,
            text_of=tokenizer.decode,
            boundary_tokens=boundary_token_ids(vocab_size, tokenizer.decode)
            if self.registry.needs_boundaries
            else None,
        )
        if settings.recompute_ratio == "auto":
            self.use_calibration(calibration.load(self.fit.family, settings.selector))
        self.disk = self._open_disk()
        self.remote = self._open_remote()
        self.loader = ChunkLoader(self.assembler, self.manager, self.disk)
        self.recorder = Recorder(settings, self.manager, self.writer, self.loader, self.reader, self.remote)
        self.fit.start_watching(settings.weights_check_seconds)  # last: nothing can fail behind it

    def _make_codec(self) -> KVCodec:
        """How KV is kept: in RAM, with copies on a GPU in front, or with the model."""
        settings, device = self.settings, self.layout.slabs[0].device
        if settings.cache_device != "cpu":
            return KVCodec(self.layout, settings.bits)
        in_one_place = all(spec.device == device for spec in self.layout.slabs)
        if settings.gpu_cache_bytes and (device.type != "cuda" or not in_one_place):
            where = device if in_one_place else "several devices"
            raise InvalidRequestError(f"gpu_cache_bytes needs a model on a GPU, and this one is on {where}")
        tier = DeviceTier.of(device, settings.gpu_cache_bytes) if in_one_place else None
        return KVCodec(self.layout, settings.bits, torch.device("cpu"), tier)

    def _open_disk(self) -> DiskCache | None:
        """The tier that `disk_cache_dir` names, behind threads that save and read."""
        if self.settings.disk_cache_dir is None:
            return None
        tier = open_tier(self.settings, self.codec, self.fit.family, label=self.model_name)
        disk = DiskCache(self.manager, self.codec, tier, self.fit.family)
        weakref.finalize(self, disk.close_unowned)  # an engine that nobody closed must end its threads too
        return disk

    def _open_remote(self) -> RemoteCache | None:
        """The store that several machines share, which `remote_cache` names."""
        if self.settings.remote_cache is None:
            return None
        remote = RemoteCache(
            open_store(self.settings.remote_cache),
            self.manager,
            self.codec,
            cuts=_weakly(self.writer.cuts),  # it must not keep the engine alive
            prefill_s=_weakly(self._prefill_seconds),
            writes=self.settings.remote_write,
        )
        weakref.finalize(self, remote.close_unowned)
        return remote

    def _prefill_seconds(self, tokens: int) -> float:
        """How long computing so many tokens takes, about: as measured so far, or as large models are."""
        speed = self.manager.prefill_tokens_per_second
        rate = _FLOPS.get(self.layout.slabs[0].device.type, _FLOPS["cuda"])
        return float(tokens / speed if speed else tokens * self.fit.costs.flops_per_token / rate)

    def look_ahead(self, request: Request) -> None:
        """Fetch what other machines have read of a prompt, before it is planned, as far as that pays."""
        if self.remote is not None and not request.looked_ahead and self._may_be_remote(request):
            request.looked_ahead = True
            self.remote.look_ahead(*self._asked_for(request))

    def seen_elsewhere(self, request: Request) -> Seen | None:
        """What `look_ahead` would fetch."""
        is_asked = self.remote is not None and self._may_be_remote(request)
        return self.remote.look(*self._asked_for(request)) if self.remote is not None and is_asked else None

    def _may_be_remote(self, request: Request) -> bool:
        return request.mode is not GenerationMode.BASELINE and not self.why_plain(request)

    def _asked_for(self, request: Request) -> tuple[np.ndarray, Namespace, int, bool]:
        """Ids, namespace, how many of them may be reused, and whether text that moved may be."""
        lookup = self.lookup(request)
        can_move = lookup.mode is AssemblyMode.CHUNK_REUSE and self.approximation.rotation is not None
        namespace = self.fit.namespace(request.namespace.salt)  # that of the request may not be read yet
        limit = lookup.limit - (lookup.limit % self.settings.chunk_size if self.bit_exact else 0)
        return lookup.token_ids, namespace, limit, can_move and not lookup.refusal

    # --- questions ---------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return str(getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__)

    def salt(self, cache_salt: str | None) -> str:
        """The salt of a call: its own, or the engine's."""
        if cache_salt is None:
            return self.settings.cache_salt
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(f"cache_salt must be text, got {cache_salt!r}")
        check_text(cache_salt, "cache_salt")
        return cache_salt

    def namespace(self, cache_salt: str | None = None) -> Namespace:
        """The namespace of KV computed now, with the salt of a call."""
        return self.fit.namespace(self.salt(cache_salt))

    def why_plain(self, request: Request) -> str:
        """Why the model's own `generate` must answer, with nothing read or stored; empty if it need not."""
        if request.namespace.gated:
            return request.namespace.gated
        return request.options.why_plain or self.why_gated(request.needed)

    def why_gated(self, tokens: int) -> str:
        """Why prompts of so many tokens get no reuse on this model; empty if they do."""
        return rope.GATED_REASON if self.requests.is_gated(tokens) else ""

    def why_alone(self, request: Request) -> str:
        """Why a request cannot be batched with others; empty if it can."""
        if request.mode is GenerationMode.BASELINE:
            return f"mode {request.mode.value}"
        if self.bit_exact or self.settings.overlap_k:
            return "bit-exact mode" if self.bit_exact else "overlap encoding"
        return self.why_plain(request) or self.fit.why_not_packed or sampling.why_alone(request.options)

    def repair_of(self, request: Request) -> Repair:
        """How moved text of a request is repaired: as it was when the request was read."""
        repair: Repair | None = request.repair
        return repair if repair is not None else self.approximation.repair()

    def lookup(self, request: Request) -> Lookup:
        """What to look for in the cache, as far as the request's mode allows."""
        mode, repair, refusal = AssemblyMode.PREFIX_ONLY, self.repair_of(request), ""
        if request.mode is GenerationMode.CHUNK_KV_REUSE:
            mode = AssemblyMode.CHUNK_REUSE
            refusal = self.approximation.refusal(len(request.prompt), repair)
        return Lookup(request.token_ids, request.namespace, request.limit, mode, repair, refusal)

    # --- changes -----------------------------------------------------------------------------

    def use_calibration(self, found: Calibration | None) -> None:
        """With `recompute_ratio="auto"`, take the ratio that held `max_kl` and `min_facts`."""
        if self.settings.recompute_ratio != "auto" or found is None:
            return
        bounds = self.settings.bounds
        ratio, words = found.ratio_for(*bounds), bounds_text(*bounds)
        self.approximation.use_ratio(ratio, f"exact reuse only: no ratio held {words}")
        _log.info("recompute_ratio=%s for %s, calibrated %s", ratio, words, found.measured_at)

    def drop_arenas(self) -> None:
        """Forget the text in the arenas that are kept for later requests."""
        for each in self.arena_holders:
            each.drop()

    def forget_all(self) -> None:
        """Drop everything, on disk too: weights changed unnoticed, so stored KV cannot be trusted."""
        self.drop_arenas()
        self.reader.answers.clear()
        self.manager.drop_all()
        self.manager.count_failure(SURPRISE_REASON)
        if self.disk is not None:
            self.disk.give_up()
        if self.remote is not None:
            self.remote.give_up()

    def clear(self) -> None:
        """Forget all cached text that is not pinned, on disk too, and remembered answers."""
        self.drop_arenas()
        self.reader.answers.clear()
        if self.disk is not None:
            self.disk.clear()
        else:
            self.manager.clear()

    def close(self) -> None:
        """Save what is not on disk yet, and free all but the model. It can be called twice."""
        for each in self.arena_holders:
            each.close()
        if self.disk is not None or self.remote is not None:
            self.fit.weights_changed()  # KV of other weights must not outlive the process
        if self.disk is not None:
            self.disk.close()
        if self.remote is not None:
            self.remote.close()
        self.reader.answers.clear()
        self.manager.drop_all()
        POOL.trim()
        self.fit.close()

    def stats(self) -> dict[str, Any]:
        """Sizes and counters at this moment."""
        stats = {
            **self.manager.stats(),
            "workspace_bytes": sum(each.nbytes for each in self.arena_holders),
            "packed_weights_bytes": linears.packed_bytes(self.model),
            "remembered_answers_bytes": self.reader.answers.size_bytes,
        }
        if self.codec.tier is not None:
            stats["gpu_cache"] = self.codec.tier.stats()
        if self.layout.slabs[0].device.type == "cuda":
            stats["transfers"] = {"pinned_bytes": POOL.nbytes, "ring_bytes": ring_bytes()}
        if self.disk is not None:
            stats["disk"] = self.disk.stats()
        if self.remote is not None:
            stats["remote"] = self.remote.stats()
        return stats


def _weakly(method: Callable[[T], R]) -> Callable[[T], R]:
    """A method of something that lives as long as it is called."""
    found = weakref.WeakMethod(method)

    def call(argument: T) -> R:
        method = found()
        assert method is not None, "called after its owner was gone"
        return method(argument)

    return call
