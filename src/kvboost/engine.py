"""The engine: one model, its tokenizer and its cache; the path of every request.

    read -> match -> place -> repair and prefill -> decode -> store

`generate` shows these steps in order. What is found and kept is the cache manager's business,
placing the assembler's, choosing what to compute again the repair strategies', running the model
decode's; this module only joins them.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from kvboost import (
    calibration,
    creeping,
    decode,
    linears,
    loading,
    repair,
    rope,
    row_decode,
    rows,
    snapshot,
    verify,
    workload,
)
from kvboost.approximation import Approximation
from kvboost.arena import Arena, probe_layout
from kvboost.attention import QueryPattern
from kvboost.cache_manager import KVCacheManager, StoreReport
from kvboost.calibration import Calibration
from kvboost.chunk_registry import ChunkRegistry, boundary_token_ids
from kvboost.compat import check_model_compatibility, choose_device, structural_refusal, text_config
from kvboost.decode import Decoded
from kvboost.errors import InvalidRequestError, UnsupportedModelError
from kvboost.explain import Explanation, explain_spans
from kvboost.keeper import Keeper
from kvboost.kv_codec import KVCodec
from kvboost.locks import model_lock
from kvboost.model_state import ModelState
from kvboost.models import (
    AssemblyMode,
    GenerationMode,
    GenerationResult,
    KVBits,
    Origin,
    RecomputeStrategy,
    ScoreResult,
    Span,
    WarmResult,
)
from kvboost.namespace import Namespace, NamespaceTracker
from kvboost.placement import Placer
from kvboost.prepared import LENGTH_REASON, PreparedPrompt
from kvboost.prompt_assembler import PromptAssembler, ReusePlan
from kvboost.prompts import UNBOUNDED, Prompt, PromptReader, ReadingBounds, check_text
from kvboost.requests import Request, RequestReader, ScoreRequest
from kvboost.row_loop import RowLoop
from kvboost.row_server import RowServer, Scores
from kvboost.selftest import check_exactness
from kvboost.settings import EngineSettings, choice
from kvboost.sparse_forward import run_pattern
from kvboost.stream import TextStream
from kvboost.verify import CorrectnessReport
from kvboost.workload import Workload
from kvboost.workspace import Workspace

if TYPE_CHECKING:
    from kvboost.disk_cache import DiskCache

DEFAULT_MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
SURPRISE_REASON = "weights had changed unseen"
_RUNNING_BATCH_TOKENS = 32_768


class InferenceEngine:
    """Reuses the KV of text that a Hugging Face causal LM has read before.

    The model is used as it is: what is switched on it during a request is restored afterwards.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        chunk_size: int = 128,
        max_chunks: int | None = 128,
        recompute_overlap: int = 16,
        recompute_strategy: RecomputeStrategy | str = RecomputeStrategy.SELECTIVE,
        recompute_ratio: float | Literal["auto"] = 0.15,
        kv_cache_bits: int | str | None = 16,
        disk_cache_dir: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        *,
        chunk_boundary_window: int = 0,
        overlap_k: int = 0,
        sink_tokens: int = 0,
        max_cache_bytes: int | None = None,
        disk_cache_bytes: int | None = None,
        cache_device: str = "cpu",
        selector: str = "guided",
        max_kl: float | None = None,
        bit_exact: bool = False,
        cache_salt: str = "",
        prefill_block: int | None = None,
        pack_weights: bool | None = None,
        weights_check_seconds: float | None = 60.0,
        strict: bool = True,
    ) -> None:
        settings = EngineSettings(
            chunk_size=chunk_size,
            max_chunks=max_chunks,
            recompute_overlap=recompute_overlap,
            recompute_strategy=recompute_strategy,
            recompute_ratio=recompute_ratio,
            kv_cache_bits=kv_cache_bits,
            disk_cache_dir=disk_cache_dir,
            chunk_boundary_window=chunk_boundary_window,
            overlap_k=overlap_k,
            sink_tokens=sink_tokens,
            selector=selector,
            max_kl=max_kl,
            max_cache_bytes=max_cache_bytes,
            disk_cache_bytes=disk_cache_bytes,
            cache_device=cache_device,
            bit_exact=bit_exact,
            cache_salt=cache_salt,
            prefill_block=prefill_block,
            pack_weights=pack_weights,
            weights_check_seconds=weights_check_seconds,
        )
        check_text(cache_salt, "cache_salt")
        check_model_compatibility(model, strict=strict)
        if (reason := structural_refusal(model)) is not None:
            raise UnsupportedModelError(f"{type(model).__name__} {reason}")
        if overlap_k and (reason := rope.scattered_refusal(model)):
            raise InvalidRequestError(f"overlap_k must be 0 on {type(model).__name__}: {reason}")
        if overlap_k and (window := rope.approximate_limit_tokens(model)) is not None:
            raise InvalidRequestError(
                f"overlap_k must be 0 on {type(model).__name__}: its sliding window of {window} tokens "
                "decides already what a token sees"
            )
        if device is not None:
            model.to(device)
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.chunk_size = chunk_size
        self.bit_exact = bit_exact
        self.chunk_registry = ChunkRegistry(chunk_size, boundary_window=chunk_boundary_window)
        self._block = settings.block
        with model_lock(model):
            self._namespaces = NamespaceTracker(
                model, self._encoding()
            )  # checks the weights over now, not later
            before = self._namespaces.watch.checksums()
            self.layout = probe_layout(model)
            if not bit_exact:
                linears.pack(model, pack_weights, self)
            check_exactness(model, self.layout)
            self.why_no_rows = rows.why_not(model, self.layout)
            self._approximation = Approximation(model, settings, rope.learn_rotation(model, self.layout))
            self._ignore_what_forwards_change(before)
        self.codec = KVCodec(
            self.layout, settings.bits, device=torch.device("cpu") if cache_device == "cpu" else None
        )
        self.cache_manager = KVCacheManager(
            max_chunks,
            max_cache_bytes,
            chunk_size=chunk_size,
            min_run_tokens=self.chunk_registry.min_chunk_tokens,
        )
        self.assembler = PromptAssembler(
            self.cache_manager,
            AssemblyMode.PREFIX_ONLY,
            whole_chunks_of=chunk_size if bit_exact else None,
            rotation=self._approximation.rotation,
            sink_tokens=sink_tokens,
            lossy_from=sink_tokens + overlap_k if overlap_k else None,
        )
        self._workspace = Workspace(self.layout)
        self._reader = PromptReader(tokenizer, text_config(model).vocab_size)
        self._requests = RequestReader(model, self._reader)
        self._keeper = Keeper(
            self.cache_manager,
            self.chunk_registry,
            self.codec,
            current=self.namespace,
            stored=self._namespaces.watch.note_stored,
            text_of=tokenizer.decode,
            boundary_tokens=boundary_token_ids(text_config(model).vocab_size, tokenizer.decode)
            if self.chunk_registry.needs_boundaries
            else None,
        )
        state = self._namespaces.watch.read()
        self._structure, self._misfit = state.structure, ""
        self._surprises = state.surprises
        family = self._namespaces.of(state, cache_salt).family
        if recompute_ratio == "auto":
            self._use_calibration(calibration.load(family, selector))
        self._disk = self._open_disk(family)
        self._placer = Placer(self.assembler, self.cache_manager, self._disk)
        self._rows = RowServer(
            model,
            tokenizer,
            self.cache_manager,
            self._placer,
            self._keeper,
            self._workspace,
            self._reader,
            self._planned,
            self._is_current,
        )
        self._workload = Workload(
            self.layout, self._begin, self._serve, self._rows.generate, self.why_alone, min_rows=2
        )
        self._scoring = Workload(
            self.layout, self._begin, self._score_alone, self._rows.score, self.why_alone, min_rows=1
        )
        if weights_check_seconds is not None:
            creeping.CREEPER.add(id(self), self._namespaces.watch, model_lock(model), weights_check_seconds)
            weakref.finalize(self, creeping.CREEPER.remove, id(self))
        self._namespaces.watch.users.add(self)
        weakref.finalize(self, self._namespaces.watch.release_if_unused)

    def _ignore_what_forwards_change(self, before: dict[str, str]) -> None:
        """Buffers that the model's own forward writes to are no change of it; seen twice, to be sure."""
        watch = self._namespaces.watch
        if suspected := watch.changed_buffers(before):
            between = watch.checksums()
            probe_layout(self.model)
            watch.ignore(suspected & watch.changed_buffers(between))

    def _open_disk(self, family: str) -> DiskCache | None:
        """The disk behind the store; a folder of its own for this model, dtype, encoding and chunk size."""
        if self.settings.disk_cache_dir is None:
            return None
        from kvboost.disk_cache import DiskCache, slot_bytes_for  # needs POSIX

        longest = self.chunk_size + 2 * self.settings.chunk_boundary_window
        slot_bytes = slot_bytes_for(self.codec, longest)
        budget = self.settings.disk_cache_bytes
        if budget is not None and budget < slot_bytes:
            raise InvalidRequestError(
                f"disk_cache_bytes must be at least {slot_bytes}, the bytes of one chunk of this model "
                f"({longest} tokens), got {budget}"
            )
        disk = DiskCache(
            self.cache_manager,
            self.codec,
            Path(self.settings.disk_cache_dir) / f"{family[:24]}-{self.chunk_size}-{slot_bytes}",
            family,
            slot_bytes=slot_bytes,
            max_bytes=budget,
            label=self._model_name(),
        )
        weakref.finalize(
            self, disk.close_unowned
        )  # nobody closed the engine: its threads must end before Python
        return disk

    @classmethod
    def from_pretrained(
        cls, model_name: str = DEFAULT_MODEL, strict: bool = True, **kwargs: Any
    ) -> InferenceEngine:
        """Load any Hugging Face decoder-only causal LM that uses RoPE.

        `model_name` is a hub name, a folder, or "builtin"; "random:8b" and "random:1b" have random weights of
        that shape, for timing. Loading options (`dtype`, `gguf_file`,
        `revision`, `trust_remote_code`, `attn_implementation`, ...) go to transformers, the rest to
        the constructor.
        """
        known = set(inspect.signature(cls.__init__).parameters) - {"self", "model", "tokenizer", "strict"}
        load_options, engine_options = loading.split_options(kwargs, known)
        device = engine_options.pop("device", None)
        EngineSettings(**engine_options)  # a bad option is said before the model is loaded
        device = device if device is not None else choose_device()
        model, tokenizer = loading.load(model_name, load_options, device)
        if "device_map" not in load_options:
            engine_options["device"] = device
        return cls(model, tokenizer, strict=strict, **engine_options)

    # --- requests ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        temperature: float = 1.0,
        do_sample: bool = False,
        *,
        cache_salt: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> GenerationResult:
        """Answer `prompt` (text, token ids or messages), reusing what the cache holds of it.

        `options` are transformers' generation options. Afterwards the prompt's and the answer's
        chunks are in the cache.
        """
        request = self._read(prompt, max_new_tokens, mode, temperature, do_sample, cache_salt, seed, options)
        return self._serve(request)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        temperature: float = 1.0,
        do_sample: bool = False,
        *,
        cache_salt: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> TextStream:
        """Like `generate`, but an iterable of text pieces, with `.result` when it is through."""
        if "streamer" in options:
            raise InvalidRequestError(
                "stream brings its own streamer; use generate(..., streamer=...) for yours"
            )
        stream = TextStream(self.tokenizer)
        request = self._read(
            prompt,
            max_new_tokens,
            mode,
            temperature,
            do_sample,
            cache_salt,
            seed,
            {**options, "streamer": stream.streamer},
        )
        if request.options.num_rows > 1:
            raise InvalidRequestError(f"stream works with num_beams=1, got {request.options.num_rows}")
        stream.start(lambda: self._serve(request), request.watch.cancelled)
        return stream

    # --- many requests -----------------------------------------------------------------------

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        do_sample: bool = False,
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        cache_salt: str | None = None,
        seed: int | None = None,
        max_batch_tokens: int | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Answer prompts that share a prefix: it is loaded or computed once, the rest runs in batches.

        Each prompt gets the answer that `generate` would give it; with a `seed`, prompt i that of `seed` + i.
        `max_batch_tokens` bounds the KV of one batch, in tokens. Where prompts fail, the PartialResultsError
        carries the other results. With `mode="chunk_kv_reuse"` or "baseline", prompts run one by one.
        """
        if self.bit_exact:
            raise InvalidRequestError(
                "generate_batch cannot be bit-exact, since other rows change the shapes that the model sees; "
                "use generate or generate_many, which run each prompt alone in this mode"
            )
        requests = self._read_all(
            prompts, max_new_tokens, mode, temperature, do_sample, cache_salt, seed, max_batch_tokens, options
        )
        outcomes = self._workload.outcomes(requests, loners_alone=False, max_batch_tokens=max_batch_tokens)
        return workload.collected(outcomes, len(requests))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        do_sample: bool = False,
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        cache_salt: str | None = None,
        seed: int | None = None,
        max_batch_tokens: int | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Answer any mixture of prompts, in their order: those that share a prefix together, others alone.

        The arguments are those of `generate_batch`. `progress=None` shows a bar on a terminal.
        """
        requests = self._read_all(
            prompts, max_new_tokens, mode, temperature, do_sample, cache_salt, seed, max_batch_tokens, options
        )
        outcomes = self._workload.outcomes(requests, loners_alone=True, max_batch_tokens=max_batch_tokens)
        return workload.collected(workload.shown(outcomes, len(requests), progress), len(requests))

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        do_sample: bool = False,
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        cache_salt: str | None = None,
        seed: int | None = None,
        max_batch_tokens: int | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Like `generate_many`, but yields each prompt's index and result when it has finished.

        Closing it early releases everything. Prompts that fail are told by a PartialResultsError at the end.
        """
        requests = self._read_all(
            prompts, max_new_tokens, mode, temperature, do_sample, cache_salt, seed, max_batch_tokens, options
        )
        outcomes = self._workload.outcomes(requests, loners_alone=True, max_batch_tokens=max_batch_tokens)
        return workload.streamed(outcomes, len(requests))

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Prompt],
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        cache_salt: str | None = None,
        max_batch_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[ScoreResult]:
        """Log-likelihoods of `continuations[i]` (text or token ids) behind `prompts[i]`, with the same reuse.

        Prompts are stored, continuations are not. Text is encoded together with its prompt's, where that
        leaves the prompt's tokens as they are.
        """
        started = time.perf_counter()
        workload.check_batch_tokens(max_batch_tokens)
        namespace = self._namespaces.last(self._salt(cache_salt))
        requests = self._requests.read_scores(prompts, continuations, namespace, mode, started)
        outcomes = self._scoring.outcomes(requests, loners_alone=False, max_batch_tokens=max_batch_tokens)
        return workload.collected(workload.shown(outcomes, len(requests), progress), len(requests))

    def _score_alone(self, request: ScoreRequest) -> ScoreResult:
        """A score by forwards of its own: without reuse, or with reuse that may need repair."""
        self._begin([request])
        gated = self._why_plain(request)
        repaired = request.mode is GenerationMode.CHUNK_KV_REUSE or self.settings.overlap_k > 0
        if request.mode is GenerationMode.BASELINE or gated or self.bit_exact or not repaired:
            reason = gated or self.why_alone(request) or "computed alone"
            with decode.running(self.model, fast=False, was_read=True):
                rope.reset_dynamic_frequencies(self.model)
                return self._scored(request, None, (self._live(request, reason),))
        plan, arena = self._place(request)
        recomputed = self._repair(plan, request, arena)
        with decode.running(self.model, fast=True, was_read=True):
            decode.prefill(self.model, request.token_ids, arena, request.limit)
            result = self._scored(request, arena, plan.spans(recomputed))
        self._store(request, request.prompt.token_ids, arena, plan, recomputed)
        self.cache_manager.count_request(
            reused=plan.reused,
            total=len(request.prompt),
            reason=plan.reason,
            approximate=plan.first_approximate < plan.total,
            recomputed=len(recomputed),
        )
        return result

    def _scored(self, request: ScoreRequest, arena: Arena | None, spans: tuple[Span, ...]) -> ScoreResult:
        """The score by one forward over what `arena` does not hold."""
        ids = request.token_ids[arena.length if arena is not None else 0 :]
        device = self.model.get_input_embeddings().weight.device
        with torch.no_grad():
            output = self.model(
                input_ids=torch.from_numpy(ids).to(device).unsqueeze(0),
                past_key_values=arena,
                use_cache=arena is not None,
                logits_to_keep=len(request.continuation),
            )
        scores = Scores(request)
        # models that know no `logits_to_keep` give all of them
        scores.add(request.limit, output.logits[0, -len(request.continuation) :])
        return scores.result(spans, self._reader.decode(request.continuation))

    def _read_all(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        mode: GenerationMode | str,
        temperature: float,
        do_sample: bool,
        cache_salt: str | None,
        seed: int | None,
        max_batch_tokens: int | None,
        options: dict[str, Any],
    ) -> list[Request]:
        started = time.perf_counter()
        workload.check_batch_tokens(max_batch_tokens)
        namespace = self._namespaces.last(self._salt(cache_salt))
        return self._requests.read_all(
            prompts, namespace, max_new_tokens, mode, temperature, do_sample, seed, options, started
        )

    def why_alone(self, request: Request) -> str:
        """Why a request cannot run beside others in one forward; empty where it can."""
        if request.mode is not GenerationMode.PREFIX_CACHE:
            return f"mode {request.mode.value}"
        if self.bit_exact or self.settings.overlap_k:
            return "bit-exact mode" if self.bit_exact else "overlap encoding"
        if why := self._why_plain(request):
            return why
        if self.why_no_rows:
            return self.why_no_rows
        return row_decode.why_alone(request.options)

    def running_batch(self, max_rows: int | None = None, prompt_tokens: int | None = None) -> RowLoop:
        """A batch that requests join and leave at any step, for servers; drive it from one thread.

        It holds at most `max_rows` requests (default 32, on a GPU 64) and the KV of `prompt_tokens` tokens
        (default 32,768, or what a quarter of the free memory holds).
        """
        if max_rows is None:
            max_rows = 64 if self.layout.slabs[0].device.type == "cuda" else 32
        if prompt_tokens is None:
            prompt_tokens = min(_RUNNING_BATCH_TOKENS, workload.default_batch_tokens(self.layout))
        return RowLoop(
            self.model,
            self.tokenizer,
            self.layout,
            self.cache_manager,
            self._placer,
            self._keeper,
            self._reader,
            self._planned,
            self._begin,
            self._is_current,
            max_rows=max_rows,
            prompt_tokens=prompt_tokens,
        )

    def read_request(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        temperature: float = 1.0,
        do_sample: bool = False,
        *,
        cache_salt: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Request:
        """Check a request without running it, for a `running_batch` or `serve`."""
        return self._read(prompt, max_new_tokens, mode, temperature, do_sample, cache_salt, seed, options)

    def serve(self, request: Request) -> GenerationResult:
        """Answer a request that was read before, alone, as `generate` does."""
        return self._serve(request)

    # --- the path of a request ---------------------------------------------------------------

    def _serve(self, request: Request) -> GenerationResult:
        """The path of a request whose input was checked."""
        self._begin([request])
        if request.mode is GenerationMode.BASELINE:
            return self._serve_baseline(request)
        if why := self._why_plain(request):
            self.cache_manager.count_request(reused=0, total=len(request.prompt), reason=why)
            return self._serve_plain(request, why)
        plan, arena = self._place(request)
        run_started = time.perf_counter()
        recomputed = self._repair(plan, request, arena)
        decoded = self._run(request, arena)
        self._store_answer(request, decoded, arena, plan, recomputed)
        self.cache_manager.count_request(
            reused=plan.reused,
            total=plan.total,
            reason=plan.reason,
            approximate=plan.first_approximate < plan.total,
            recomputed=len(recomputed),
            prefill_seconds=decoded.first_token_at - run_started,
        )
        return self._result(request, decoded, plan.spans(recomputed))

    def _begin(self, requests: Sequence[Request]) -> None:
        """Read what the model is as these requests begin: their KV belongs to it, and to nothing else."""
        state = self._namespaces.watch.read()
        for request in requests:
            request.namespace = self._namespace_of(state, request.namespace.salt)

    def _namespace_of(self, state: ModelState, salt: str) -> Namespace:
        """The namespace of a state that was just read, gated where the engine does not fit the model now."""
        if state.surprises != self._surprises:
            self._surprises = state.surprises
            self._forget_all()
        if state.structure != self._structure and not state.gated:
            with model_lock(self.model):
                self._misfit = self._why_misfit()
                if not self._misfit:
                    self.why_no_rows = rows.why_not(self.model, self.layout)
            self._structure = state.structure
        found = self._namespaces.of(state, salt)
        return dataclasses.replace(found, gated=self._misfit) if self._misfit and not found.gated else found

    def _forget_all(self) -> None:
        """Weights had changed unseen while KV was stored: what is kept, on disk too, cannot be trusted."""
        self._workspace.drop()
        self._reader.forget_answers()
        self.cache_manager.drop_all()
        self.cache_manager.count_failure(SURPRISE_REASON)
        if self._disk is not None:
            self._disk.give_up()

    def _why_misfit(self) -> str:
        """Why KV of the model as it is now cannot be kept by this engine."""
        try:
            fits = probe_layout(self.model) == self.layout
        except UnsupportedModelError as error:
            return f"gated: {error}"
        return (
            "" if fits else "gated: the model's dtype or devices are not those that the engine was made for"
        )

    def _is_current(self, namespace: Namespace) -> bool:
        """Whether the model is still what it was when `namespace` was read."""
        return self.namespace(namespace.salt) == namespace

    def _why_plain(self, request: Request) -> str:
        """Why the model's own generate must answer, with nothing read or stored; empty where it need not."""
        if request.namespace.gated:
            return request.namespace.gated
        return request.options.why_plain or (
            rope.GATED_REASON if self._requests.is_gated(request.needed) else ""
        )

    def _planned(self, request: Request) -> AbstractContextManager[ReusePlan]:
        """What the cache holds of the prompt, as far as the request's mode allows."""
        with_content = request.mode is GenerationMode.CHUNK_KV_REUSE
        return self.assembler.planned(
            request.token_ids,
            request.namespace,
            limit=request.limit,
            mode=AssemblyMode.CHUNK_REUSE if with_content else AssemblyMode.PREFIX_ONLY,
            estimate=self._approximation.estimate,
            refusal=self._approximation.refusal(len(request.prompt)) if with_content else "",
        )

    def _place(self, request: Request) -> tuple[ReusePlan, Arena]:
        """What is reused of the prompt, and an arena that holds it, with room for the rest and the answer."""
        capacity = request.needed
        arena, exact, any_kind = self._workspace.take(capacity, request.namespace.key, request.token_ids)
        return self._placer.place(lambda: self._planned(request), arena, exact, any_kind), arena

    def _repair(self, plan: ReusePlan, request: Request, arena: Arena) -> np.ndarray:
        """Compute again what the new surroundings change, and what is missing between reused runs.

        Returns the reused positions `[n]` that were computed again.
        """
        if not plan.needs_repair:
            return np.zeros(0, dtype=np.int64)
        strategy = self._approximation.strategy(plan)
        with decode.running(self.model, fast=True, was_read=True):
            return repair.complete(
                self.model, request.token_ids, arena, plan.repair_runs, strategy, end=len(request.prompt) - 1
            )

    def _run(self, request: Request, arena: Arena) -> Decoded:
        """Prefill what is missing and decode."""
        total = len(request.prompt)
        with decode.running(self.model, fast=not self.bit_exact, was_read=True):
            decode.prefill(
                self.model, request.token_ids, arena, self._last_stop(arena.length, total), block=self._block
            )
            if request.options.num_rows > 1:
                arena.batch_repeat_interleave(request.options.num_rows)
            return decode.generate(
                self.model, self.tokenizer, request.token_ids, arena, request.options, request.watch
            )

    def _last_stop(self, start: int, total: int) -> int:
        """Where generate takes over: the last forward of the prompt is its own."""
        stop = start
        while (following := decode.next_stop(stop, total, self._block)) < total:
            stop = following
        return stop

    def _serve_baseline(self, request: Request) -> GenerationResult:
        """The model's own generate; in bit-exact mode in the same blocks as with reuse."""
        if not self.bit_exact or self._why_plain(request):
            return self._serve_plain(request, "baseline")
        capacity = request.needed
        arena = Workspace(self.layout).take(capacity, "", request.token_ids)[0]
        decoded = self._run(request, arena)
        return self._result(request, decoded, (self._live(request, "baseline"),))

    def _serve_plain(self, request: Request, reason: str) -> GenerationResult:
        """Stock attention and cache, the model as it stands; nothing read and nothing stored."""
        with decode.running(self.model, fast=False, was_read=True):
            rope.reset_dynamic_frequencies(self.model)
            decoded = decode.generate(
                self.model, self.tokenizer, request.token_ids, None, request.options, request.watch
            )
        return self._result(request, decoded, (self._live(request, reason),))

    # --- filling the cache -------------------------------------------------------------------

    def warm(self, text: Prompt, position_offset: int = 0, *, cache_salt: str | None = None) -> WarmResult:
        """Read `text` once, in one contiguous prefill, and keep its KV.

        Text warmed at a `position_offset` other than 0 is found by content only.
        """
        prompt = self._reader.read(text, self._salt(cache_salt), warming=True)
        total = len(prompt)
        self._requests.check_positions(position_offset + total, "position_offset and text", position_offset)
        namespace = self.namespace(cache_salt)
        end = total - total % self.chunk_size if self.bit_exact else total
        tail = total % self.chunk_size
        gated = rope.GATED_REASON if self._requests.is_gated(position_offset + total) else ""
        if why := namespace.gated or gated:
            return WarmResult(0, total, self.chunk_size, tail == 0, tail, f"not kept, {why}")
        report = self._warm_exact(prompt.token_ids, end, namespace, position_offset)
        return WarmResult(
            chunks_stored=report.present + report.stored,
            token_count=total,
            chunk_size=self.chunk_size,
            chunk_boundary_aligned=tail == 0,
            partial_tail_tokens=tail,
            alignment_warning=self._alignment_warning(tail),
        )

    def _warm_exact(
        self, ids: np.ndarray, end: int, namespace: Namespace, position_offset: int
    ) -> StoreReport:
        if position_offset:
            namespace = namespace.at_offset(position_offset)
        arena, already, _ = self._workspace.take(max(end, 1), namespace.key, ids)
        plan = self._placer.place(lambda: self.assembler.planned(ids, namespace, limit=end), arena, already)
        with decode.running(self.model, fast=not self.bit_exact, was_read=True):
            if self.settings.overlap_k:
                self._encode_with_overlap(ids, arena, end, position_offset)
            else:
                decode.prefill(
                    self.model, ids, arena, end, block=self._block, position_offset=position_offset
                )
        self._placer.make_way(end - plan.reused)
        report = self._keeper.keep(ids[:end], arena, namespace, position_offset=position_offset)
        if not report.is_refused:
            self._workspace.give_back(arena, namespace.key, ids[:end])
            self._placer.save_soon()
        return report

    def _encode_with_overlap(self, ids: np.ndarray, arena: Arena, end: int, position_offset: int) -> None:
        """Fill `arena` up to `end`; each chunk sees only the sink tokens and the last K tokens before it."""
        device = self.model.get_input_embeddings().weight.device
        start, chunk_start = arena.length, 0
        for cut in self._keeper.cuts(ids[:end]):
            if cut <= start:
                chunk_start = cut
                continue
            visible = torch.zeros(cut, dtype=torch.bool, device=device)
            visible[: self.settings.sink_tokens] = True
            visible[max(0, chunk_start - self.settings.overlap_k) :] = True
            pattern = QueryPattern(torch.arange(start, cut, device=device), cut, filled=visible)
            run_pattern(self.model, ids, arena, pattern, position_offset=position_offset)
            start = chunk_start = cut
        arena.set_length(end)

    def _store_answer(
        self, request: Request, decoded: Decoded, arena: Arena, plan: ReusePlan, recomputed: np.ndarray
    ) -> None:
        """Keep the KV of prompt and answer, as far as it was computed, and the answer's ids."""
        total = len(request.prompt)
        ids = request.token_ids
        if arena.batch == 1:
            ids = np.concatenate([ids, np.asarray(decoded.token_ids, dtype=np.int64)])[:-1]
            if arena.length != len(ids):
                self._keeper.refuse(LENGTH_REASON)
                return
        if self.bit_exact:
            ids = ids[: total - total % self.chunk_size]
        if not self._store(request, ids, arena, plan, recomputed).is_refused:
            text = self._reader.decode(decoded.token_ids)
            self._reader.remember_answer(text, decoded.token_ids, request.namespace.salt)

    def _store(
        self, request: Request, ids: np.ndarray, arena: Arena, plan: ReusePlan, recomputed: np.ndarray
    ) -> StoreReport:
        """Keep the KV of `ids` `[tokens]`, which `arena` holds."""
        if self.settings.overlap_k:  # what was computed here saw more than its encoding allows
            return self._warm_exact(ids, len(ids), request.namespace, 0)
        self._placer.make_way(len(ids) - plan.reused)
        exact = plan.first_approximate if plan.first_approximate < plan.total else len(ids)
        if exact == len(ids):
            report = self._keeper.keep(ids, arena, request.namespace)
        else:
            changed = recomputed
            if plan.needs_repair and self._approximation.touches_all(plan):
                changed = repair.positions_of(plan.repair_runs, exact=False)
            report = self._keeper.keep_approximate(ids, arena, request.namespace, plan, changed)
        if not report.is_refused:
            self._workspace.give_back(arena, request.namespace.key, ids, exact)
            self._placer.save_soon()
        return report

    # --- one's own generate loop -------------------------------------------------------------

    def prepare(
        self, prompt: Prompt, max_new_tokens: int = 64, *, cache_salt: str | None = None
    ) -> PreparedPrompt:
        """Inputs for one's own `model.generate(**prepared)`: ids, mask and a cache with what is known.

        `max_new_tokens` only sizes the cache, which grows where it must. Your call must not ask for assisted
        decoding or `use_cache=False`: then transformers feeds the whole prompt again.
        """
        options = decode.read_options(self.model, max_new_tokens, 1.0, False, None, {})
        salt = self._salt(cache_salt)
        request = Request(
            self._reader.read(prompt, salt),
            GenerationMode.PREFIX_CACHE,
            options,
            self.namespace(salt),
            time.perf_counter(),
        )
        ids = request.token_ids
        self._requests.check_positions(len(ids), "the prompt", len(ids))
        if why := self._why_plain(request) or options.why_not_prepared:
            return PreparedPrompt.gated(self.model, ids, why)
        arena = Arena(self.layout, len(ids) + max_new_tokens)
        plan = self._placer.place(
            lambda: self.assembler.planned(ids, request.namespace, limit=len(ids) - 1), arena
        )
        self.cache_manager.count_request(reused=plan.reused, total=plan.total, reason=plan.reason)
        if self.bit_exact:
            with decode.running(self.model, fast=False, was_read=True):
                decode.prefill(
                    self.model, ids, arena, self._last_stop(arena.length, len(ids)), block=self._block
                )
        prepared = PreparedPrompt.ready(self.model, ids, arena, plan.spans(), request.namespace)
        arena.written_by = prepared.check_with(self._is_current)
        return prepared

    def commit(self, prepared: PreparedPrompt, output_ids: torch.Tensor | Sequence[int]) -> StoreReport:
        """Store what `model.generate(**prepared)` computed; `output_ids` is what it returned.

        Nothing is stored where the model was another one meanwhile, or the cache holds another number of
        tokens. That the answer's ids are those that were run is taken from the caller.
        """
        ids = prepared.computed_ids(output_ids)
        if ids is None or prepared.arena is None or prepared.namespace is None:
            return StoreReport()
        if why := prepared.why_not_stored(ids):
            return self._keeper.refuse(why)
        prompt_tokens = len(prepared.token_ids)
        answer = ids[prompt_tokens:].tolist()
        if self.bit_exact:
            ids = ids[: prompt_tokens - prompt_tokens % self.chunk_size]
        if self.settings.overlap_k:
            report = self._warm_exact(ids, len(ids), prepared.namespace, 0)
        else:
            report = self._keeper.keep(ids, prepared.arena, prepared.namespace)
        if not report.is_refused:
            self._placer.save_soon()
            if not self.bit_exact:
                self._reader.remember_answer(self._reader.decode(answer), answer, prepared.namespace.salt)
        return report

    # --- why, and why not --------------------------------------------------------------------

    def explain(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        *,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        cache_salt: str | None = None,
    ) -> Explanation:
        """What would be reused of `prompt`, span by span, and why the rest would not. Changes nothing."""
        checked_mode = choice(GenerationMode, "mode", mode)
        salt = self._salt(cache_salt)
        tokens = self._reader.read(prompt, salt)
        ids = tokens.token_ids
        namespace = self.namespace(salt)
        by_rope = rope.GATED_REASON if self._requests.is_gated(len(ids) + max_new_tokens) else ""
        gated = namespace.gated or by_rope
        if gated or checked_mode is GenerationMode.BASELINE:
            reason = gated or "baseline"
            spans: tuple[Span, ...] = (Span(0, len(ids), Origin.LIVE, reason),)
            return explain_spans(spans, ids.tolist(), self.tokenizer.decode, lambda _key: None, None)
        with_content = checked_mode is GenerationMode.CHUNK_KV_REUSE
        refusal = self._approximation.refusal(len(ids)) if with_content else ""
        plan = self.assembler.plan(
            ids,
            namespace,
            limit=len(ids) - 1,
            mode=AssemblyMode.CHUNK_REUSE if with_content else AssemblyMode.PREFIX_ONLY,
            estimate=self._approximation.estimate,
            refusal=refusal,
        )
        donors = {piece.chunk.chunk_id: piece.chunk for piece in [*plan.pieces, *plan.moved_pieces]}

        def donor_of(key: str) -> tuple[tuple[int, int], int, bool] | None:
            chunk = donors.get(key)
            if chunk is None:
                return None
            positions = (chunk.position_start, chunk.position_end)
            return positions, chunk.access_count, not chunk.kv.is_loaded

        note = refusal or (self._approximation.choice(plan) if with_content else "")
        return explain_spans(
            plan.spans(), ids.tolist(), self.tokenizer.decode, donor_of, plan.match.divergence, note
        )

    # --- the cache ---------------------------------------------------------------------------

    def cache_stats(self) -> dict[str, Any]:
        """Sizes and counters of the cache at this moment."""
        stats = {
            **self.cache_manager.stats(),
            "workspace_bytes": self._workspace.nbytes,
            "packed_weights_bytes": linears.packed_bytes(self.model),
            "remembered_answers_bytes": self._reader.answers_bytes,
            "batches": dataclasses.asdict(self._rows.counts),
        }
        return stats if self._disk is None else {**stats, "disk": self._disk.stats()}

    def pin(self, text: Prompt, *, cache_salt: str | None = None) -> int:
        """Keep what is stored of `text` from eviction; returns how many of its tokens that are."""
        return self._change_pin(self.cache_manager.pin, text, cache_salt)

    def unpin(self, text: Prompt, *, cache_salt: str | None = None) -> int:
        """Take one pin of `text` back; returns how many of its tokens are stored."""
        return self._change_pin(self.cache_manager.unpin, text, cache_salt)

    def _change_pin(
        self, change: Callable[[np.ndarray, Namespace], int], text: Prompt, cache_salt: str | None
    ) -> int:
        salt = self._salt(cache_salt)
        tokens = self._reader.read(text, salt, warming=True)
        return change(tokens.token_ids, self.namespace(salt))

    def save(self, path: str | os.PathLike[str], *, progress: bool | None = None) -> int:
        """Write the whole cache to the folder `path`; returns the number of chunks.

        A save that is cut off leaves the one before it. `progress=None` shows a bar on a terminal.
        """
        self.weights_changed()  # what is saved outlives this process: be sure whose it is
        family = self.namespace("").family
        return snapshot.save(
            Path(path), self.cache_manager, self.codec, family, self._model_name(), progress=progress
        )

    def load(self, path: str | os.PathLike[str], *, progress: bool | None = None) -> snapshot.LoadReport:
        """Add the chunks saved in the folder `path`, as far as they fit, evicting nothing.

        A cache of another model or encoding is refused; damaged chunks are left out and counted.
        """
        family = self.namespace("").family
        return snapshot.load(
            Path(path), self.cache_manager, self.codec, family, self._model_name(), progress=progress
        )

    def calibrate(
        self,
        prompts: int = calibration.DEFAULT_PROMPTS,
        *,
        report: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Calibration:
        """Measure the error of approximate reuse on this model at several ratios, and keep it for `max_kl`.

        Takes a few seconds per prompt and leaves this engine's cache alone; `report` hears how many
        prompts are done. With `recompute_ratio="auto"` the result holds from now on.
        """
        if refusal := self._approximation.refusal(0, calibrating=True):
            raise InvalidRequestError(f"there is nothing to calibrate: {refusal}")
        with self.reopened(recompute_ratio=0.15, max_kl=None) as engine:
            found = calibration.measure(
                engine,
                model=self._model_name(),
                selector=self.settings.selector,
                prompts=prompts,
                max_positions=self._requests.max_positions,
                report=report,
            )
        calibration.save(found)
        self._use_calibration(found)
        return found

    def reopened(self, **changes: Any) -> InferenceEngine:
        """An engine on the same model with other settings and an empty cache, without limits and disk."""
        options = {**dataclasses.asdict(self.settings), "max_chunks": None, "max_cache_bytes": None}
        options |= {"disk_cache_dir": None, "disk_cache_bytes": None, **changes}
        return InferenceEngine(self.model, self.tokenizer, strict=False, **options)

    def verify_correctness(
        self,
        prompts: Sequence[Prompt] | int | None = None,
        max_new_tokens: int = 32,
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        report: Callable[[int, int, str], None] = lambda _done, _total, _what: None,
    ) -> CorrectnessReport:
        """Answer prompts with reuse and without, and check every part of the engine against the stock model.

        The report is truthy exactly when all greedy answers are equal; its `passed` wants all checks as well.
        With no prompts one of our own is asked; a number in their place means `max_new_tokens`. What is asked
        is stored as after `generate`. `report` hears how far it is.
        """
        asked = None if isinstance(prompts, int) else prompts
        new_tokens = prompts if isinstance(prompts, int) else max_new_tokens
        return verify.verify(self, asked, new_tokens, choice(GenerationMode, "mode", mode), report=report)

    def tokenize(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        warming: bool = False,
        bounds: ReadingBounds = UNBOUNDED,
    ) -> list[int]:
        """The token ids that the model would read for `prompt`; with `warming`, those that `warm` reads."""
        salt = self._salt(cache_salt)
        ids: list[int] = self._reader.read(prompt, salt, warming=warming, bounds=bounds).token_ids.tolist()
        return ids

    @property
    def kv_cache_bits(self) -> KVBits:
        """Bits of a stored number."""
        return self.settings.bits

    @property
    def is_quantized(self) -> bool:
        """Whether stored KV has fewer bits than the model's."""
        return self.codec.is_lossy

    @property
    def is_lossy(self) -> bool:
        """Whether chunks do not see all that stands before them (overlap encoding)."""
        return self.settings.overlap_k > 0

    @property
    def rotation(self) -> rope.KeyRotation | str:
        """What moves keys to other positions, or why nothing does."""
        return self._approximation.rotation or self._approximation.unmovable

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has; None = it does not say."""
        return self._requests.max_positions

    def _use_calibration(self, found: Calibration | None) -> None:
        """With `recompute_ratio="auto"`, take the ratio that held `max_kl`."""
        if self.settings.recompute_ratio != "auto" or found is None:
            return
        bound = self.settings.max_kl or calibration.DEFAULT_MAX_KL
        self._approximation.ratio = found.ratio_for(bound)
        self._approximation.no_ratio_reason = f"exact reuse only: no ratio held max_kl={bound:g}"

    def _model_name(self) -> str:
        return str(getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__)

    def clear(self) -> None:
        """Forget all cached text that is not pinned, on disk too, and remembered answers."""
        self._workspace.drop()
        self._reader.forget_answers()
        if self._disk is not None:
            self._disk.clear()
        else:
            self.cache_manager.clear()

    def close(self) -> None:
        """Save what is not on disk yet, and free what the engine holds beside the model.

        It can be called twice. A closed engine should not be used any more.
        """
        self._workspace.drop()
        if self._disk is not None:
            self.weights_changed()  # what was computed by others than it says must not outlive the process
            self._disk.close()
        self._reader.forget_answers()
        self.cache_manager.drop_all()
        linears.unpack(self.model, self)
        creeping.CREEPER.remove(id(self))
        self._namespaces.watch.users.discard(self)
        self._namespaces.watch.release_if_unused()

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- checks and small parts --------------------------------------------------------------

    def _read(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        mode: GenerationMode | str,
        temperature: float,
        do_sample: bool,
        cache_salt: str | None,
        seed: int | None,
        options: dict[str, Any],
    ) -> Request:
        started = time.perf_counter()
        namespace = self._namespaces.last(self._salt(cache_salt))
        return self._requests.read(
            prompt, namespace, max_new_tokens, mode, temperature, do_sample, seed, options, started
        )

    def _encoding(self) -> dict[str, Any]:
        """The settings that change stored KV."""
        encoding: dict[str, Any] = {
            "kv_cache_bits": self.settings.bits,
            "overlap_k": self.settings.overlap_k,
            "sink_tokens": self.settings.sink_tokens,
            "bit_exact": self.bit_exact,
        }
        if self.bit_exact:
            encoding["block"] = self.chunk_size
            encoding["torch"] = torch.__version__
            encoding["threads"] = torch.get_num_threads()
        return encoding

    def namespace(self, cache_salt: str | None = None) -> Namespace:
        """Whose KV this engine's is: of this model, as it is now, in this encoding, under a salt."""
        return self._namespace_of(self._namespaces.watch.read(), self._salt(cache_salt))

    def weights_changed(self) -> bool:
        """Check all weights over now, and say whether they had changed unnoticed.

        A write to a whole tensor is noticed by the next request without this, one to a part of it within
        `weights_check_seconds`; whoever writes in place and cannot wait calls it after writing.
        """
        has_changed = self._namespaces.watch.check_all()
        self.namespace()
        return has_changed

    def _salt(self, cache_salt: str | None) -> str:
        if cache_salt is None:
            return self.settings.cache_salt
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(f"cache_salt must be text, got {cache_salt!r}")
        check_text(cache_salt, "cache_salt")
        return cache_salt

    def _live(self, request: Request, reason: str) -> Span:
        return Span(0, len(request.prompt), Origin.LIVE, reason)

    def _alignment_warning(self, tail: int) -> str | None:
        if tail == 0:
            return None
        if self.bit_exact:
            return f"the last {tail} tokens do not fill a block and are not kept in bit-exact mode"
        return f"the last {tail} tokens do not fill a chunk; they are kept as a short one and reused exactly"

    def _result(self, request: Request, decoded: Decoded, spans: tuple[Span, ...]) -> GenerationResult:
        return request.result(decoded, spans, self._reader.decode(decoded.token_ids))


KVBoost = InferenceEngine
