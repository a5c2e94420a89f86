"""The engine: one model, its tokenizer and its cache, behind the public calls.

Reading a call's arguments is `requests`' job, running requests the executors' (`executor`), which join match,
place, repair, run and store. This module only hands over.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvboost.batching import many
from kvboost.choices import GenerationMode, KVBits, choice
from kvboost.choices import RecomputeStrategy as RecomputeStrategy
from kvboost.compat import choose_device
from kvboost.disk import snapshot
from kvboost.errors import InvalidRequestError
from kvboost.executor.core import EngineCore
from kvboost.identity.namespace import Namespace
from kvboost.kv import rope
from kvboost.loading import pretrained
from kvboost.models import GenerationResult, ScoreResult, WarmResult
from kvboost.proof import calibration, evaluation, evaluation_settings, verify
from kvboost.proof.calibration import Calibration
from kvboost.proof.evaluation_report import EvaluationReport
from kvboost.proof.questions import Source
from kvboost.proof.verify import CorrectnessReport
from kvboost.requests.encoding import UNBOUNDED, ReadingBounds
from kvboost.requests.prepared import PreparedPrompt
from kvboost.requests.prompts import Prompt
from kvboost.requests.request import Arguments
from kvboost.requests.stream import TextStream
from kvboost.reuse.explain import Explanation
from kvboost.settings import DEFAULT_MODEL, EngineArguments, PretrainedArguments
from kvboost.signatures import constructor_takes, takes
from kvboost.store.inserter import StoreReport


class InferenceEngine:
    """Reuses the KV of text that a Hugging Face causal LM has read before.

    The model is used as it is: what is switched on it during a request is restored afterwards. The options
    are those of `kvboost.settings.EngineSettings`. `core` is internal, and may change at any time.
    """

    @constructor_takes(EngineArguments)
    def __init__(self, arguments: EngineArguments) -> None:
        # Not type(self): a subclass may have another constructor.
        self.core = EngineCore(arguments, engine_class=InferenceEngine)
        parts = self.core.parts
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.settings = parts.settings
        self.chunk_size = parts.settings.chunk_size
        self.bit_exact = parts.settings.bit_exact
        self.layout = parts.layout
        self.codec = parts.codec
        self.chunk_registry = parts.registry
        self.cache_manager = parts.manager
        self.assembler = parts.assembler

    @classmethod
    @takes(PretrainedArguments)
    def from_pretrained(
        cls, model_name: str = DEFAULT_MODEL, strict: bool = True, **kwargs: Any
    ) -> InferenceEngine:
        """Load any Hugging Face decoder-only causal LM that uses RoPE.

        `model_name` is a hub name, a folder, or "builtin"; "random:8b" and "random:1b" have random weights of
        that shape, for timing. Loading options (`dtype`, `gguf_file`,
        `revision`, `trust_remote_code`, `attn_implementation`, ...) go to transformers, the rest to
        the constructor.
        """
        arguments = PretrainedArguments.checked(model_name, strict, kwargs)  # before anything is loaded
        device = arguments.device if arguments.device is not None else choose_device()
        model, tokenizer = pretrained.load(model_name, arguments.loading_options, device)
        options = {name: value for name, value in kwargs.items() if name in arguments.engine_options}
        if arguments.device_map is None:
            options["device"] = device
        return cls(model, tokenizer, strict=strict, **options)

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
        recompute_ratio: float | None = None,
        selector: str | None = None,
        **options: Any,
    ) -> GenerationResult:
        """Answer `prompt` (text, token ids or messages), reusing what the cache holds of it.

        `recompute_ratio` and `selector` stand in for the engine's own in this call. `options` are
        transformers' generation options. Afterwards the prompt's and the answer's chunks are in the cache.
        """
        repair = (recompute_ratio, selector)
        arguments = Arguments(max_new_tokens, mode, temperature, do_sample, cache_salt, seed, options, repair)
        return self.core.notice.told(self.core.serve(self.core.read(prompt, arguments)))

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
        recompute_ratio: float | None = None,
        selector: str | None = None,
        **options: Any,
    ) -> TextStream:
        """Like `generate`, but an iterable of text pieces, with `.result` when it is through."""
        repair = (recompute_ratio, selector)
        arguments = Arguments(max_new_tokens, mode, temperature, do_sample, cache_salt, seed, options, repair)
        return self.core.stream(prompt, arguments)

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
        recompute_ratio: float | None = None,
        selector: str | None = None,
        max_batch_tokens: int | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Answer prompts that share a prefix: it is loaded or computed once, the rest runs in batches.

        Each prompt gets the answer that `generate` would give it; with a `seed`, prompt i that of `seed` + i.
        `max_batch_tokens` bounds the KV of one batch, in tokens. Where prompts fail, the PartialResultsError
        carries the other results. With `mode="baseline"`, prompts run one by one.
        """
        if self.bit_exact:
            raise InvalidRequestError(
                "generate_batch cannot be bit-exact, since other sequences change the shapes that the model "
                "sees; use generate or generate_many, which run each prompt alone in this mode"
            )
        repair = (recompute_ratio, selector)
        arguments = Arguments(max_new_tokens, mode, temperature, do_sample, cache_salt, seed, options, repair)
        outcomes = self.core.outcomes(prompts, arguments, max_batch_tokens, unshared_alone=False)
        return many.collected(outcomes, len(prompts))

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
        recompute_ratio: float | None = None,
        selector: str | None = None,
        max_batch_tokens: int | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Answer any mixture of prompts, in their order: those that share a prefix together, others alone.

        With `mode="chunk_kv_reuse"` text may be shared anywhere, and all of them run together.
        The arguments are those of `generate_batch`. `progress=None` shows a bar on a terminal.
        """
        repair = (recompute_ratio, selector)
        arguments = Arguments(max_new_tokens, mode, temperature, do_sample, cache_salt, seed, options, repair)
        outcomes = self.core.outcomes(prompts, arguments, max_batch_tokens, unshared_alone=True)
        return many.collected(many.shown(outcomes, len(prompts), progress), len(prompts))

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
        recompute_ratio: float | None = None,
        selector: str | None = None,
        max_batch_tokens: int | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Like `generate_many`, but yields each prompt's index and result when it has finished.

        Closing it early releases everything. Prompts that fail are told by a PartialResultsError at the end.
        """
        repair = (recompute_ratio, selector)
        arguments = Arguments(max_new_tokens, mode, temperature, do_sample, cache_salt, seed, options, repair)
        outcomes = self.core.outcomes(prompts, arguments, max_batch_tokens, unshared_alone=True)
        return many.streamed(outcomes, len(prompts))

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Prompt],
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        cache_salt: str | None = None,
        recompute_ratio: float | None = None,
        selector: str | None = None,
        max_batch_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[ScoreResult]:
        """Log-likelihoods of `continuations[i]` (text or token ids) behind `prompts[i]`, with the same reuse.

        Prompts are stored, continuations are not. Text is encoded with its prompt's where that keeps these.
        """
        arguments = Arguments(mode=mode, cache_salt=cache_salt, repair=(recompute_ratio, selector))
        outcomes = self.core.scores(prompts, continuations, arguments, max_batch_tokens)
        return many.collected(many.shown(outcomes, len(prompts), progress), len(prompts))

    # --- filling the cache, and one's own generate loop ---------------------------------------

    def warm(self, text: Prompt, position_offset: int = 0, *, cache_salt: str | None = None) -> WarmResult:
        """Read `text` once, in one contiguous prefill, and keep its KV.

        Text warmed at a `position_offset` other than 0 is found by content only.
        """
        return self.core.warmer.warm(text, position_offset, cache_salt)

    def warm_documents(
        self,
        texts: Sequence[str | Sequence[int]],
        behind: Prompt | None = None,
        *,
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> list[WarmResult]:
        """Read documents once, so that they are found anywhere in later prompts; a result for each, in order.

        Each is read behind those before it, and all behind `behind`, the text or messages that they will
        follow: text that was read first of all transfers worse. What is held like that is not read again.
        """
        return self.core.documents.warm(texts, behind, cache_salt, progress)

    def prepare(
        self, prompt: Prompt, max_new_tokens: int = 64, *, cache_salt: str | None = None
    ) -> PreparedPrompt:
        """Inputs for one's own `model.generate(**prepared)`: ids, mask and a cache with what is known.

        `max_new_tokens` only sizes the cache, which grows where it must. Your call must not ask for assisted
        decoding or `use_cache=False`: then transformers feeds the whole prompt again.
        """
        return self.core.own_loop.prepare(prompt, max_new_tokens, cache_salt)

    def commit(self, prepared: PreparedPrompt, output_ids: torch.Tensor | Sequence[int]) -> StoreReport:
        """Store what `model.generate(**prepared)` computed; `output_ids` is what it returned.

        Nothing is stored where the model was another one meanwhile, or the cache holds another number of
        tokens. That the answer's ids are those that were run is taken from the caller.
        """
        return self.core.own_loop.commit(prepared, output_ids)

    # --- why, and is it right ----------------------------------------------------------------

    def explain(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        *,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        cache_salt: str | None = None,
        recompute_ratio: float | None = None,
        selector: str | None = None,
    ) -> Explanation:
        """What would be reused of `prompt`, span by span, and why the rest would not. Changes nothing."""
        repair = (recompute_ratio, selector)
        arguments = Arguments(max_new_tokens, mode, cache_salt=cache_salt, repair=repair)
        return self.core.explain(prompt, arguments)

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
        wanted = choice(GenerationMode, "mode", mode)
        return verify.verify(self, prompts, max_new_tokens, wanted, report=report)

    def calibrate(
        self,
        prompts: int = calibration.DEFAULT_PROMPTS,
        *,
        report: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Calibration:
        """Measure what approximate reuse costs on this model at several ratios, for `max_kl` and `min_facts`.

        Takes a few seconds per prompt and leaves this engine's cache alone; `report` hears how many
        prompts are done. With `recompute_ratio="auto"` the result holds from now on.
        """
        return calibration.calibrate(self, prompts, report)

    def evaluate(
        self,
        questions: Source,
        *,
        modes: Sequence[GenerationMode | str] = evaluation_settings.MODES,
        ratios: Sequence[float] = evaluation_settings.RATIOS,
        max_new_tokens: int = evaluation_settings.NEW_TOKENS,
        read: str = "alone",
        results: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> EvaluationReport:
        """Ask your own questions over documents that were read before, in every mode and at every ratio.

        `questions` is a file of JSON lines or a list (docs/your-questions.md); `read` says how documents were
        read, "alone" or "together". A run that finds the file `results` goes on where that stopped. This
        engine's cache is left alone. `progress=None` shows a bar on a terminal.
        """
        settings = evaluation_settings.EvaluationSettings.checked(modes, ratios, max_new_tokens, read)
        return evaluation.evaluate(self, questions, settings, results, progress)

    # --- the cache ---------------------------------------------------------------------------

    def cache_stats(self) -> dict[str, Any]:
        """Sizes and counters of the cache at this moment."""
        steps = {"steps": self.core.resident.step_stats()} if self.core.resident.exists else {}
        return {**self.core.parts.stats(), "batches": dataclasses.asdict(self.core.many.counts), **steps}

    def pin(self, text: Prompt, *, cache_salt: str | None = None) -> int:
        """Keep what is stored of `text` from eviction; returns how many of its tokens that are."""
        return self.cache_manager.pin(*self.core.stored_as(text, cache_salt))

    def unpin(self, text: Prompt, *, cache_salt: str | None = None) -> int:
        """Take one pin of `text` back; returns how many of its tokens are stored."""
        return self.cache_manager.unpin(*self.core.stored_as(text, cache_salt))

    def save(self, path: str | os.PathLike[str], *, progress: bool | None = None) -> int:
        """Write the whole cache to the folder `path`; returns the number of chunks.

        A save that is cut off leaves the one before it. `progress=None` shows a bar on a terminal.
        """
        self.weights_changed()  # what is saved outlives this process: be sure whose it is
        owner = self.namespace("").family, self.core.parts.model_name
        return snapshot.save(Path(path), self.cache_manager, self.codec, *owner, progress=progress)

    def load(self, path: str | os.PathLike[str], *, progress: bool | None = None) -> snapshot.LoadReport:
        """Add the chunks saved in the folder `path`, as far as they fit, evicting nothing.

        A cache of another model or encoding is refused; damaged chunks are left out and counted.
        """
        owner = self.namespace("").family, self.core.parts.model_name
        return snapshot.load(Path(path), self.cache_manager, self.codec, *owner, progress=progress)

    def clear(self) -> None:
        """Forget all cached text that is not pinned, on disk too, and remembered answers."""
        self.core.parts.clear()

    def close(self) -> None:
        """Save what is not on disk yet, and free what the engine holds beside the model.

        It can be called twice. A closed engine should not be used any more.
        """
        self.core.parts.close()

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the model -----------------------------------------------------------------------------

    def tokenize(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        warming: bool = False,
        bounds: ReadingBounds = UNBOUNDED,
    ) -> list[int]:
        """The token ids that the model would read for `prompt`; with `warming`, those that `warm` reads."""
        read = self.core.tokenize(prompt, cache_salt, warming=warming, bounds=bounds)
        ids: list[int] = read.token_ids.tolist()
        return ids

    def namespace(self, cache_salt: str | None = None) -> Namespace:
        """Whose KV this engine's is: of this model, as it is now, in this encoding, under a salt."""
        return self.core.parts.namespace(cache_salt)

    def weights_changed(self) -> bool:
        """Check all weights over now, and say whether they had changed unnoticed.

        A write to a whole tensor is noticed by the next request without this, one to a part of it within
        `weights_check_seconds`; whoever writes in place and cannot wait calls it after writing.
        """
        return self.core.parts.fit.weights_changed()

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
    def why_not_packed(self) -> str:
        """Why sequences cannot share a forward on this model; empty where they can."""
        return self.core.parts.fit.why_not_packed

    @property
    def rotation(self) -> rope.KeyRotation | str:
        """What moves keys to other positions, or why nothing does."""
        return self.core.parts.fit.rotation

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has; None = it does not say."""
        return self.core.parts.requests.max_positions


KVBoost = InferenceEngine
