"""States in which a model cannot be known: autocast, hooks, replaced forwards, train mode, some adapters.

In these, the same weights may give any numbers, so nothing may be read or stored. Knows models, no cache.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from kvboost.identity.structure import ModelStructure

_KNOWN_PACKAGES = ("kvboost", "transformers", "accelerate")  # whose hooks and forwards change no numbers
_training = operator.itemgetter("training")
_hooks = operator.itemgetter("_forward_hooks")
_pre_hooks = operator.itemgetter("_forward_pre_hooks")


def gated_reason(structure: ModelStructure, device_types: set[str]) -> str:
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
    return ""


def peft_reason(model: Any) -> str:
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
