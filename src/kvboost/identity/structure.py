"""What a model is beside the values of its weights: its modules, and what changes their numbers.

Listed once for quick looks are modules, parameters and buffers. Compared with each reading are adapters, the
config (with the model's own attention implementation, also while ours stands in it) and torch's settings. And
there are states in which a model cannot be known: autocast, hooks, replaced forwards, train mode, some
adapters. In these, the same weights may give any numbers, so nothing may be read or stored. Knows models, no
values and no cache.
"""

from __future__ import annotations

import hashlib
import operator
import sys
import weakref
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from kvboost.compat import comparable

_ADAPTER_FIELDS = ("merged_adapters", "_active_adapter", "_disable_adapters", "scaling")
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "_attn_implementation_autoset")
_ORIGIN_CONFIG = ("_commit_hash",)  # where the same weights came from; None for those of a folder
_KNOWN_PACKAGES = ("kvboost", "transformers", "accelerate")  # whose hooks and forwards change no numbers
# By class, as it was made: transformers loads another revision's file under the same path.
_code_digests: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_values = operator.methodcaller("values")
_training = operator.itemgetter("training")
_hooks = operator.itemgetter("_forward_hooks")
_pre_hooks = operator.itemgetter("_forward_pre_hooks")


class ModelStructure:
    """The modules of `model` as one list of their dictionaries, so that a look at all of them is quick.

    Tensors named in `volatile` are skipped: the model's own forward changes them.
    """

    def __init__(self, model: torch.nn.Module, volatile: frozenset[str]) -> None:
        named = list(model.named_modules())
        self.names = [name or type(model).__name__ for name, _ in named]
        self.dicts = [module.__dict__ for _, module in named]
        self.kinds = [type(module) for _, module in named]
        self.classes = tuple(
            f"{name}: {_package_of(kind)}.{kind.__qualname__}"
            for (name, _), kind in zip(named, self.kinds, strict=True)
        )
        self._root = weakref.ref(model)
        # A module compiled by torch may lack a field: it passes on that of the module inside.
        every = list(zip(self.names, self.dicts, strict=True))
        self.flagged = [(name, each) for name, each in every if "training" in each]
        self.flags = [each for _, each in self.flagged]
        self.hooked = [(name, each) for name, each in every if "_forward_hooks" in each]
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
        self.skipped: set[int] = set()  # numbers of tensors that the model's own forward changes
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
        """Whether the model still has the same modules, of the same classes, with as many tensors."""
        modules = tuple(chain.from_iterable(map(_values, self.children)))
        if modules != self.modules or any(self._empty) or type(self._root()) is not self.kinds[0]:
            return False
        has_classes = list(map(type, modules)) == self._child_kinds
        return has_classes and sum(map(len, self.tensor_dicts)) == len(self.tensor_names)

    def present(self) -> list[torch.Tensor | None]:
        """Parameters and buffers as they are now, in the order of `tensor_names`."""
        return list(chain.from_iterable(map(_values, self.tensor_dicts)))


def _package_of(kind: type) -> str:
    """Its module; a model's own code lies under a name made of the folder that it was loaded from.

    That says nothing on another machine, and the code may be another under the same name: its digest is told.
    """
    path = kind.__module__
    if not path.startswith("transformers_modules."):
        return path
    if kind not in _code_digests:
        _code_digests[kind] = _code_digest(path)
    return f"transformers_modules.{path.rpartition('.')[2]} {_code_digests[kind]}"


def _code_digest(path: str) -> str:
    """A digest of the source of a module and of all beside it, which it may import; else its path."""
    file = getattr(sys.modules.get(path), "__file__", None)
    try:
        found = {each.name: each.read_bytes() for each in Path(str(file)).parent.glob("*.py")}
    except OSError:
        return path
    digest = hashlib.sha256()
    for name, source in sorted(found.items()):
        digest.update(f"{name} {len(source)}\0".encode() + source)
    return digest.hexdigest() if found else path


def _changes_with_length(module: torch.nn.Module, name: str) -> bool:
    """Whether it holds rope frequencies that the model's own forward sets by the length of its input."""
    kind = str(getattr(module, "rope_type", ""))
    return name.endswith("inv_freq") and not name.startswith("original") and kind in ("dynamic", "longrope")


# --- what changes its numbers --------------------------------------------------------------------


def surroundings_of(model: torch.nn.Module, structure: ModelStructure) -> tuple[Any, ...]:
    """Adapters, config and settings that change what the same weights compute."""
    adapters = tuple(str([each.get(name) for name in _ADAPTER_FIELDS]) for each in structure.adapters)
    return adapters, _config_of(model), _numerics(), structure.classes


def _config_of(model: Any) -> list[tuple[str, dict[str, Any]]]:
    """The fields of the model's configs, with the model's own attention, even while ours is in its place."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return []
    found = []
    parts = [each for each in vars(config).values() if hasattr(each, "to_dict") and hasattr(each, "__dict__")]
    for each in (config, *parts):
        fields = {
            name: type(value).__name__ if hasattr(value, "to_dict") else _lasting(comparable(value))
            for name, value in vars(each).items()
            if name not in _VOLATILE_CONFIG
        }
        fields |= {name: None for name in _ORIGIN_CONFIG if name in fields}
        attention = "_attn_implementation"
        internal = f"{attention}_internal"
        fields[internal if internal in fields else attention] = own_name(getattr(each, attention, None))
        found.append((type(each).__name__, fields))
    return found


def _lasting(value: Any) -> Any:
    """A value of a config without what differs from machine to machine, at every depth."""
    if isinstance(value, dict):
        dropped = (*_VOLATILE_CONFIG, *_ORIGIN_CONFIG, "name_or_path", "base_model_name_or_path")
        return {name: _lasting(each) for name, each in value.items() if name not in dropped}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def _numerics() -> tuple[Any, ...]:
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


class BorrowedName(str):
    """Our name while it stands in a model's config. A copy of the config gets the model's own name."""

    own: str

    def __deepcopy__(self, _memo: object) -> str:
        return self.own

    def __copy__(self) -> str:
        return self.own

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.own,)


BORROWED_NAMES: dict[str, BorrowedName] = {}  # by the model's own implementation


def own_name(name: Any) -> Any:
    """The model's own attention implementation, where `name` stands in its config."""
    if isinstance(name, BorrowedName):
        return name.own
    return next((own for own, ours in BORROWED_NAMES.items() if ours == name), name)


# --- states that cannot be known -----------------------------------------------------------------


def gated_reason(model: Any, structure: ModelStructure, device_types: set[str]) -> str:
    """Why nothing may be read or stored while the model is in this state; empty if it may."""
    if why := _ambient_reason(device_types):
        return f"gated: {why}"
    if any(map(_training, structure.flags)):
        return f"gated: {next(name for name, each in structure.flagged if each['training'])} is in train mode"
    if any(map(_hooks, structure.hooks)) or any(map(_pre_hooks, structure.hooks)):
        for name, each in structure.hooked:
            for hook in (*each["_forward_hooks"].values(), *each["_forward_pre_hooks"].values()):
                if not _is_known(hook):
                    return f"gated: {name} has a forward hook"
    for number, each in enumerate(structure.dicts):
        if "forward" in each and not _is_known_forward(each, structure.kinds[number]):
            return f"gated: the forward of {structure.names[number]} was replaced"
    return _peft_reason(model)


def _peft_reason(model: Any) -> str:
    """Why an active adapter forbids reuse; empty if none does.

    Some begin where the prompt last calls them: a token's KV then depends on the text behind it.
    """
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
    """Whether a mode other than torch's default device is on."""
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
    """Whether it is ours, the class's own put back, or accelerate's, which moves layers between devices."""
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
