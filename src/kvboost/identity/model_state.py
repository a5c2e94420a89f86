"""What a model is right now, read at a cost that every request can bear.

Two readings are equal exactly when KV of the first may serve the second. What is compared each time: which
modules, parameters and buffers there are, where they lie, their version counters, some of their values
(`weights.Probe`), adapters, the config, the attention implementation and torch's settings for numbers. A
write to a few values of a tensor that moves no counter is found by a checksum in a background thread
(`scrubber`), or by `check_all`.

Some states cannot be known: autocast, hooks, replaced forwards and train flags may make any number of the
same weights. A reading in such a state says so, and nothing is read or stored then. Knows models, no cache.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from kvboost import locks
from kvboost.compat import comparable
from kvboost.identity import scrubber
from kvboost.identity.attention_name import own_name
from kvboost.identity.weights import Checksum, Probe, checksum

_ADAPTER_FIELDS = ("merged_adapters", "_active_adapter", "_disable_adapters", "scaling")
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "_attn_implementation_autoset")
_KNOWN_PACKAGES = ("kvboost", "transformers", "accelerate")  # whose hooks and forwards change no numbers
_values = operator.methodcaller("values")
_training = operator.itemgetter("training")
_hooks = operator.itemgetter("_forward_hooks")
_pre_hooks = operator.itemgetter("_forward_pre_hooks")


@dataclass(frozen=True)
class ModelState:
    """One reading. `version` counts the changes seen; `gated` says why nothing may be reused now, if so.

    `surprises` counts changes that were overlooked for a while, though KV was stored meanwhile: under which
    weights that was computed is not known.
    """

    version: int
    structure: int
    surprises: int = 0
    gated: str = ""


class _Layout:
    """The modules of a model in one list, by their dictionaries: so a look at all of them is quick."""

    def __init__(self, model: torch.nn.Module, volatile: frozenset[str]) -> None:
        named = list(model.named_modules())
        self.names = [name or type(model).__name__ for name, _ in named]
        self.dicts = [module.__dict__ for _, module in named]
        self.kinds = [type(module) for _, module in named]
        self.classes = tuple(
            f"{name}: {kind.__module__}.{kind.__qualname__}"
            for (name, _), kind in zip(named, self.kinds, strict=True)
        )
        self._root = weakref.ref(model)
        # A module that torch has compiled hands on what it does not hold itself.
        self.flagged = [
            (name, each) for name, each in zip(self.names, self.dicts, strict=True) if "training" in each
        ]
        self.flags = [each for _, each in self.flagged]
        self.hooked = [
            (name, each)
            for name, each in zip(self.names, self.dicts, strict=True)
            if "_forward_hooks" in each
        ]
        self.hooks = [each for _, each in self.hooked]
        self.children = [each["_modules"] for each in self.dicts if each["_modules"]]
        self._empty = [
            each[kind]
            for each in self.dicts
            for kind in ("_modules", "_parameters", "_buffers")
            if not each[kind]
        ]
        self.modules = tuple(chain.from_iterable(map(_values, self.children)))
        self._child_kinds = list(map(type, self.modules))
        self.adapters = [each for each in self.dicts if "merged_adapters" in each]
        self.tensor_dicts: list[dict[str, torch.Tensor | None]] = []
        self.tensor_names: list[str] = []
        self.skipped: set[int] = set()  # numbers of those that the model's own forward changes
        for name, module in named:
            for kind in ("_parameters", "_buffers"):
                found = module.__dict__[kind]
                if not found:
                    continue
                self.tensor_dicts.append(found)
                for key in found:
                    full = f"{name}.{key}" if name else key
                    if full in volatile or _changes_with_length(module, key):
                        self.skipped.add(len(self.tensor_names))
                    self.tensor_names.append(full)

    def is_current(self) -> bool:
        modules = tuple(chain.from_iterable(map(_values, self.children)))
        if modules != self.modules or any(self._empty) or type(self._root()) is not self.kinds[0]:
            return False
        has_classes = list(map(type, modules)) == self._child_kinds
        return has_classes and sum(map(len, self.tensor_dicts)) == len(self.tensor_names)

    def present(self) -> list[torch.Tensor | None]:
        """Parameters and buffers as they are now, in the order of `tensor_names`."""
        return list(chain.from_iterable(map(_values, self.tensor_dicts)))


def _changes_with_length(module: torch.nn.Module, name: str) -> bool:
    """Whether it is a frequency that the model's own forward sets, by the length of what it reads."""
    kind = str(getattr(module, "rope_type", ""))
    return name.endswith("inv_freq") and not name.startswith("original") and kind in ("dynamic", "longrope")


class _Known:
    """Tensors as they were at the last reading, each once: names, versions, places, checksums, a probe."""

    def __init__(self, layout: _Layout, present: list[torch.Tensor | None]) -> None:
        self.ids = list(map(id, present))
        picks: dict[int, int] = {}
        for number, tensor in enumerate(present):
            if tensor is not None and number not in layout.skipped:
                picks.setdefault(id(tensor), number)
        self._picks = list(picks.values())
        self.numbers = {key: number for number, key in enumerate(picks)}  # by id
        tensors = self.tensors(present)
        self.names = [layout.tensor_names[number] for number in self._picks]
        self.versions, self.places = _versions(tensors), _places(tensors)
        self.kinds = [f"{tensor.dtype}|{tuple(tensor.shape)}|{tensor.device.type}" for tensor in tensors]
        self.probe = Probe(tensors)
        self.probe.note()
        self.checksums: list[bytes] = []
        self.device_types = {"cpu", *(tensor.device.type for tensor in tensors if not tensor.is_meta)}
        self.is_elsewhere = any(tensor.is_meta for tensor in tensors)  # what they are is not known
        self.nbytes = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)

    def tensors(self, present: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Those that are looked at, of `present`, which are the same tensors as they were."""
        return [present[number] for number in self._picks]  # type: ignore[misc]  # None is never picked

    def is_same(self, present: list[torch.Tensor | None]) -> bool:
        """Whether no tensor was replaced, moved, or written to in a way that torch counts."""
        if list(map(id, present)) != self.ids:
            return False
        tensors = self.tensors(present)
        return _versions(tensors) == self.versions and _places(tensors) == self.places


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return [each._version for each in tensors]
    except RuntimeError:  # inference tensors have none
        return [0 if each.is_inference() else each._version for each in tensors]


def _places(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return [each.data_ptr() for each in tensors]
    except RuntimeError:
        return [_place(each) for each in tensors]


def _place(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return 0


class ModelWatch:
    """Reads the state of one model. Engines on the same model share it; it holds the model only weakly."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._lock = locks.fork_safe_rlock()
        self._volatile: frozenset[str] = frozenset()
        self._layout = _Layout(model, self._volatile)
        self._known: _Known | None = None
        self._surroundings: Any = None
        self._version = 0
        self._structure = 0
        self._suspects: set[str] = set()  # names of tensors whose checksum is not the one that is known
        self._surprises = 0
        self._stored = [False, False]  # KV: before the pass that is under way, and since
        self._scrubbing: Iterator[int] | None = None
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # engines

    @property
    def model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        return model

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return self._known.nbytes if self._known is not None else 0

    def read(self) -> ModelState:
        """The state now. Checks over only what may have changed."""
        model = self.model
        scrubber.SCRUBBER.ensure_running()
        with self._lock:
            known = self._compare(model)
            gated = gated_reason(self._layout, known.device_types) or _peft_reason(model)
            if known.is_elsewhere:
                gated = gated or "gated: weights are offloaded"
            return ModelState(self._version, self._structure, self._surprises, gated)

    def check_all(self) -> bool:
        """Compare the checksums of all values with those known; returns whether any had changed."""
        model = self.model
        with self._lock:
            before = self._version
            known = self._compare(model)
            tensors = known.tensors(self._layout.present())
            self._suspects |= {
                name
                for name, tensor, value in zip(known.names, tensors, known.checksums, strict=True)
                if checksum(tensor) != value
            }
            if not self._suspects:
                self._stored = [False, False]
            self._compare(model)
            return self._version != before

    def note_stored(self) -> None:
        """KV of the model as it was read last is stored now."""
        self._stored[1] = True

    def checksums(self) -> dict[str, str]:
        """The checksum of every tensor, by name, as of the last reading."""
        with self._lock:
            known = self._known
            assert known is not None
            each = zip(known.names, known.kinds, known.checksums, strict=True)
            return {name: f"{kind}|{value.hex()}" for name, kind, value in each}

    def read_for(self) -> tuple[ModelState, dict[str, str], Any]:
        """A reading with the checksums and surroundings that it goes by, all of one moment."""
        with self._lock:
            state = self.read()
            return state, self.checksums(), self._surroundings

    def release_if_unused(self) -> None:
        """Where no engine uses it any more, hold no memory of the model until it is read again."""
        if not self.users and self._lock.acquire(blocking=False):  # garbage is collected in any thread
            try:
                self._known = None
            finally:
                self._lock.release()

    def checksum_of(self, tensor: torch.Tensor) -> bytes | None:
        """The checksum of one of the model's tensors as of the last reading; None where it was not read."""
        known = self._known
        number = known.numbers.get(id(tensor)) if known is not None else None
        return known.checksums[number] if known is not None and number is not None else None

    def changed_buffers(self, before: dict[str, str]) -> set[str]:
        """Buffers whose values are not what `before` says, the checksums of an earlier time by name."""
        self.read()
        buffers = {name for name, _ in self.model.named_buffers()}
        now = self.checksums()
        return {name for name in buffers & before.keys() & now.keys() if before[name] != now[name]}

    def ignore(self, names: set[str]) -> None:
        """Leave these out from now on: the model's own forward changes them."""
        with self._lock:
            self._volatile |= names
            self._layout = _Layout(self.model, self._volatile)
            self._known = None
        self.read()

    # --- comparing ---------------------------------------------------------------------------

    def _compare(self, model: torch.nn.Module) -> _Known:
        if not self._layout.is_current():
            self._layout = _Layout(model, self._volatile)
            self._structure += 1
            locks.forget_model_lock(model)
        surroundings = _surroundings(model, self._layout)
        if surroundings != self._surroundings:
            self._surroundings = surroundings
            self._version += 1
            self._structure += 1
        present = self._layout.present()
        known = self._known
        if known is None or self._suspects or not known.is_same(present) or known.probe.differs():
            return self._look_over(present, known)
        return known

    def _look_over(self, present: list[torch.Tensor | None], known: _Known | None) -> _Known:
        """Take the checksums of tensors that may have changed."""
        fresh = _Known(self._layout, present)
        tensors = fresh.tensors(present)
        before, untouched = self._as_before(known, fresh)
        has_changed = known is None or known.names != fresh.names or known.kinds != fresh.kinds
        for number, (name, tensor) in enumerate(zip(fresh.names, tensors, strict=True)):
            value = before[name] if number in untouched else checksum(tensor)
            fresh.checksums.append(value)
            has_changed |= before.get(name) != value
        self._structure += known is None or known.kinds != fresh.kinds
        self._version += has_changed
        self._known = fresh
        if self._suspects and any(self._stored):
            self._surprises += 1
        if self._suspects:
            self._stored = [False, False]
        self._suspects.clear()
        return fresh

    def _as_before(self, known: _Known | None, fresh: _Known) -> tuple[dict[str, bytes], set[int]]:
        """The checksums known by name, and the numbers of tensors of which nothing speaks for a change."""
        if known is None:
            return {}, set()
        before = dict(zip(known.names, known.checksums, strict=True))
        if known.names != fresh.names or known.ids != fresh.ids:
            return before, set()
        if known.places != fresh.places and not known.probe.holds_memory:
            return before, set()
        written = known.probe.changed()
        return before, {
            number
            for number, name in enumerate(fresh.names)
            if name not in self._suspects
            and number not in written
            and known.versions[number] == fresh.versions[number]
            and known.places[number] == fresh.places[number]
        }

    # --- scrubbing ---------------------------------------------------------------------------

    def scrub(self, most_bytes: int) -> bool:
        """Check over some more of the values; returns whether a pass has ended. For the scrubber."""
        if self._scrubbing is None:
            self._scrubbing = self._pass(most_bytes)
        if next(self._scrubbing, None) is not None:
            return False
        self._scrubbing = None
        return True

    def _pass(self, most_bytes: int) -> Iterator[int]:
        with self._lock:
            known = self._known
            self._stored = [any(self._stored), False]
            present = self._layout.present()
            if known is None or not known.is_same(present):
                self._known = None  # the next reading looks it all over; until then no old memory is held
                return
            tensors = [weakref.ref(tensor) for tensor in known.tensors(present)]
        del present
        left = most_bytes
        for number, reference in enumerate(tensors):
            tensor = reference()
            if tensor is None or tensor.is_meta or tensor.numel() == 0:
                continue
            part = Checksum(tensor)
            while count := part.advance(left):
                left -= count
                if left <= 0:
                    yield number
                    left = most_bytes
            with self._lock:
                is_same = _versions([tensor])[0] == known.versions[number]
                if self._known is not known or not is_same or _place(tensor) != known.places[number]:
                    return
                if part.digest() != known.checksums[number]:
                    self._suspects.add(known.names[number])
            del tensor, part
        with self._lock:
            if self._known is known and not self._suspects:
                self._stored[0] = False


_watches: weakref.WeakKeyDictionary[Any, ModelWatch] = weakref.WeakKeyDictionary()
_guard = locks.fork_safe_lock()


def watch_of(model: torch.nn.Module) -> ModelWatch:
    """The watch of a model, one for all who use it."""
    with _guard:
        if model not in _watches:
            _watches[model] = ModelWatch(model)
        return _watches[model]


# --- what is around the weights ------------------------------------------------------------------


def _surroundings(model: torch.nn.Module, layout: _Layout) -> tuple[Any, ...]:
    """Adapters, config and settings that change what the same weights compute."""
    return _adapter_states(layout.adapters), config_of(model), numerics(), layout.classes


def _adapter_states(layers: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(str([each.get(name) for name in _ADAPTER_FIELDS]) for each in layers)


def config_of(model: Any) -> list[tuple[str, dict[str, Any]]]:
    """The fields of the model's configs; the attention is the model's own, whoever runs a forward now."""
    found = []
    config = getattr(model, "config", None)
    for each in _with_parts(config):
        fields = {
            name: type(value).__name__ if hasattr(value, "to_dict") else comparable(value)
            for name, value in vars(each).items()
            if name not in _VOLATILE_CONFIG
        }
        name = (
            "_attn_implementation_internal"
            if "_attn_implementation_internal" in fields
            else "_attn_implementation"
        )
        fields[name] = own_name(getattr(each, "_attn_implementation", None))
        found.append((type(each).__name__, fields))
    return found


def _with_parts(config: Any) -> list[Any]:
    if config is None or not hasattr(config, "to_dict"):
        return []
    parts = [
        value for value in vars(config).values() if hasattr(value, "to_dict") and hasattr(value, "__dict__")
    ]
    return [config, *parts]


def numerics() -> tuple[Any, ...]:
    """Settings of torch that change the numbers of a forward."""
    cuda = torch.backends.cuda.matmul
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's newer settings are in use
        precision = str(getattr(cuda, "fp32_precision", ""))
    return (
        precision,
        cuda.allow_bf16_reduced_precision_reduction,
        cuda.allow_fp16_reduced_precision_reduction,
        torch.get_default_dtype(),
    )


# --- states that cannot be known -----------------------------------------------------------------


def gated_reason(layout: _Layout, device_types: set[str]) -> str:
    """Why nothing may be read or stored while the model is like this; empty where it may."""
    if why := _ambient_reason(device_types):
        return f"gated: {why}"
    if any(map(_training, layout.flags)):
        return f"gated: {next(name for name, each in layout.flagged if each['training'])} is in train mode"
    if any(map(_hooks, layout.hooks)) or any(map(_pre_hooks, layout.hooks)):
        for name, each in layout.hooked:
            for hook in (*each["_forward_hooks"].values(), *each["_forward_pre_hooks"].values()):
                if not _is_known(hook):
                    return f"gated: {name} has a forward hook"
    for number, each in enumerate(layout.dicts):
        if "forward" in each and not _is_known_forward(each, layout.kinds[number]):
            return f"gated: the forward of {layout.names[number]} was replaced"
    return ""


def _peft_reason(model: Any) -> str:
    """Adapters that begin where the prompt last calls them: a token's KV depends on what comes after it."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return ""
    active = getattr(model, "active_adapters", ())
    for name in active if isinstance(active, (list, tuple)) else ():
        if getattr(configs.get(name), "alora_invocation_tokens", None):
            return f"gated: the adapter {name} begins where the prompt calls it"
    return ""


def _ambient_reason(device_types: set[str]) -> str:
    if any(map(torch.is_autocast_enabled, device_types)):
        return "autocast is on"
    hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    if any(hooks):
        return "there is a forward hook for all modules"
    if torch._C._len_torch_dispatch_stack() or _function_modes():
        return "a torch mode changes what operators do"
    return ""


def _function_modes() -> bool:
    """Whether a mode is on that is not just torch's default device."""
    if not torch._C._len_torch_function_stack():
        return False
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _is_known(function: Any) -> bool:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return package in _KNOWN_PACKAGES


def _is_known_forward(fields: dict[str, Any], kind: Any) -> bool:
    """Whether it is ours, the class's own put back, or that of a library which moves layers about."""
    forward = fields["forward"]
    if kind.__module__.startswith("torch._dynamo"):
        return True  # a compiled module calls the one inside
    if "_hf_hook" in fields:
        hook = fields["_hf_hook"]
        hooks = [hook, *getattr(hook, "hooks", ())]  # accelerate keeps several in one
        inside = getattr(fields.get("_old_forward"), "__func__", None)
        origins = [getattr(getattr(forward, "func", None), "__module__", "")]
        origins += [type(each).__module__ for each in hooks]
        return inside is kind.forward and all(str(each).startswith("accelerate.") for each in origins)
    return getattr(forward, "__func__", None) is kind.forward or hasattr(forward, "is_kvboosts")
