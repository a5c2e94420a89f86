"""Which model state an engine's KV belongs to, and whether the engine still fits its model.

All that an engine learns about its model is learned here when it is made, and the model's state is read here
when a request begins. Knows no store.
"""

from __future__ import annotations

import dataclasses
import platform
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvboost.compat import check_model_compatibility, structural_refusal
from kvboost.errors import InvalidRequestError, UnsupportedModelError
from kvboost.identity import scrubber
from kvboost.identity.model_state import ModelState, ModelWatch
from kvboost.identity.namespace import Namespace, NamespaceTracker
from kvboost.kernels import linears
from kvboost.kv import rope
from kvboost.kv.layout import probe_layout
from kvboost.locks import model_lock
from kvboost.proof.selftest import check_exactness
from kvboost.requests.request import Request
from kvboost.reuse.costs import ForwardCosts
from kvboost.reuse.device_rates import measured_rates
from kvboost.run import packed_step
from kvboost.settings import EngineSettings

_OTHER_LAYOUT = "gated: the model's dtype or devices are not those that the engine was made for"


def check_model(model: Any, settings: EngineSettings, *, strict: bool) -> None:
    """Refuse a model whose KV cannot be reused, and options that it cannot have."""
    check_model_compatibility(model, strict=strict)
    name = type(model).__name__
    if (reason := structural_refusal(model)) is not None:
        raise UnsupportedModelError(f"{name} {reason}")
    if not settings.overlap_k:
        return
    if reason := rope.scattered_refusal(model):
        raise InvalidRequestError(f"overlap_k must be 0 on {name}: {reason}")
    if (window := rope.approximate_limit_tokens(model)) is not None:
        raise InvalidRequestError(
            f"overlap_k must be 0 on {name}: its sliding window of {window} tokens decides already what a "
            "token sees"
        )


def encoding_of(settings: EngineSettings) -> dict[str, Any]:
    """The settings that change stored KV."""
    encoding: dict[str, Any] = {
        "kv_cache_bits": settings.bits,
        "overlap_k": settings.overlap_k,
        "sink_tokens": settings.sink_tokens,
        "bit_exact": settings.bit_exact,
    }
    if settings.bit_exact:
        encoding["block"] = settings.chunk_size
        encoding["torch"] = torch.__version__
        encoding["threads"] = torch.get_num_threads()
        encoding["processors"] = _processors()
    return encoding


def _processors() -> list[str]:
    """What computes here: others sum in another order, so their last bits differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(names), *gpus]


@dataclasses.dataclass
class Reading:
    """One reading of a model's state for several questions; None before the first."""

    state: ModelState | None = None


class ModelFit:
    """What one engine knows of its model: layout, rotation, whether sequences can be packed, namespaces.

    `on_surprise` is called if weights have changed unnoticed: stored KV cannot be trusted then.
    """

    def __init__(self, model: Any, settings: EngineSettings, on_surprise: Callable[[], None]) -> None:
        self._model = model
        self._shared = threading.local()  # a reading that several questions share
        self._on_surprise = on_surprise
        with model_lock(model):
            self._namespaces = NamespaceTracker(model, encoding_of(settings))  # reads all weights, now
            self.watch: ModelWatch = self._namespaces.watch  # what reads the model's state
            before = self.watch.checksums()
            self.layout = probe_layout(model)
            if not settings.bit_exact:
                linears.pack(model, settings.pack_weights, self)
            check_exactness(model, self.layout)
            self.why_not_packed = packed_step.why_not(model, self.layout)
            self.rotation = rope.learn_rotation(model, self.layout)
            rates = None
            if not self.why_not_packed:  # runs the model on a GPU
                rates = measured_rates(model, self.layout, from_host=settings.cache_device == "cpu")
            self.costs = ForwardCosts(model, settings.chunk_size, rates)
            self._ignore_what_forwards_change(before)
        state = self.watch.read()
        self._structure, self._misfit = state.structure, ""
        self._surprises = state.surprises
        self.family = self._namespaces.of(state, settings.cache_salt).family

    def start_watching(self, check_seconds: float | None) -> None:
        """Watch the model; all weights are checked over every `check_seconds`, None = never."""
        if check_seconds is not None:
            scrubber.SCRUBBER.add(id(self), self.watch, model_lock(self._model), check_seconds)
            weakref.finalize(self, _stop_scrubbing, id(self))
        self.watch.users.add(self)
        weakref.finalize(self, self.watch.release_if_unused)

    def _ignore_what_forwards_change(self, before: dict[str, str]) -> None:
        """Ignore buffers that every forward writes to; a second forward confirms which."""
        if suspected := self.watch.changed_buffers(before):
            between = self.watch.checksums()
            probe_layout(self._model)
            self.watch.ignore(suspected & self.watch.changed_buffers(between))

    def last_namespace(self, salt: str) -> Namespace:
        """The namespace as it was read last, without reading the model again."""
        return self._namespaces.last(salt)

    def namespace(self, salt: str) -> Namespace:
        """The namespace of KV computed now: this model in its present state, this encoding, and `salt`."""
        reading: Reading | None = getattr(self._shared, "reading", None)
        if reading is None:
            return self._namespace_of(self.watch.read(), salt)
        if reading.state is None:
            reading.state = self.watch.read()
        return self._namespace_of(reading.state, salt)

    @contextmanager
    def one_reading(self, reading: Reading | None) -> Iterator[None]:
        """Inside, and in this thread, `reading`, if any, answers what is asked of the model's state."""
        outer = getattr(self._shared, "reading", None)
        self._shared.reading = reading
        try:
            yield
        finally:
            self._shared.reading = outer

    def as_read(self, state: ModelState, salt: str) -> Namespace:
        """The namespace of the model in a state that was just read."""
        return self._namespace_of(state, salt)

    def begin(self, requests: Sequence[Request]) -> ModelState:
        """Read the model's state as these requests begin: their KV belongs to it."""
        state = self.watch.read()
        for request in requests:
            request.namespace = self._namespace_of(state, request.namespace.salt)
        return state

    def is_current(self, namespace: Namespace) -> bool:
        """Whether the model has not changed since `namespace` was read."""
        return self.namespace(namespace.salt) == namespace

    def weights_changed(self) -> bool:
        """Check all weights now; returns whether they had changed unnoticed."""
        has_changed = self.watch.check_all()
        self.namespace("")
        return has_changed

    def _namespace_of(self, state: ModelState, salt: str) -> Namespace:
        """The namespace of a state that was just read; gated if the engine no longer fits the model."""
        if state.surprises != self._surprises:
            self._surprises = state.surprises
            self._on_surprise()
        if state.structure != self._structure and not state.gated:
            with model_lock(self._model):
                self._misfit = self._why_misfit()
                if not self._misfit:
                    self.why_not_packed = packed_step.why_not(self._model, self.layout)
            self._structure = state.structure
        found = self._namespaces.of(state, salt)
        return dataclasses.replace(found, gated=self._misfit) if self._misfit and not found.gated else found

    def _why_misfit(self) -> str:
        """Why this engine cannot keep KV of the model as it is now; empty if it can."""
        try:
            fits = probe_layout(self._model) == self.layout
        except UnsupportedModelError as error:
            return f"gated: {error}"
        return "" if fits else _OTHER_LAYOUT

    def close(self) -> None:
        """Stop watching the model and free its packed weights. It can be called twice."""
        linears.unpack(self._model, self)
        _stop_scrubbing(id(self))
        self.watch.users.discard(self)
        self.watch.release_if_unused()


def _stop_scrubbing(user: int) -> None:
    scrubber.SCRUBBER.remove(user)  # looked up now: a forked process has another
