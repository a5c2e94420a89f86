"""The namespace digest: whose KV it is. Keys of one digest never serve another.

It covers every parameter's name, shape, dtype and values, the config, adapters, device type,
attention implementation and all settings that change stored KV. Values are checked over once at
load; afterwards only what can change them cheaply is compared. Knows no store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

FORMAT_VERSION = 1
_ADAPTER_FIELDS = ("merged_adapters", "_active_adapter", "_disable_adapters", "scaling")
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "_attn_implementation_autoset")
_DEVICE_BLOCK = 1 << 24  # elements summed at once on an accelerator


@dataclass(frozen=True)
class Namespace:
    """`key` starts every chain. `family` is the same digest without the salt.

    Beside its exact chains a namespace has others, each under a root of its own, whose `base` is the
    key of the namespace: they are found by content or as approximate, never as an exact prefix.
    """

    key: str
    family: str
    salt: str
    base: str = ""

    @property
    def content_key(self) -> str:
        """The key under which text is found by content, whichever chain it stands in."""
        return self.base or self.key

    def at_offset(self, position_offset: int) -> Namespace:
        """The root of text encoded from another position than 0: never a prefix of a prompt."""
        return self._beside(f"offset {position_offset}")

    def loose(self) -> Namespace:
        """The root of text that was computed while looking at approximate KV."""
        return self._beside("loose")

    def approximate(self) -> Namespace:
        """The root of the approximate chains: whole prompts put together from parts and repaired."""
        return self._beside("approximate")

    def _beside(self, what: str) -> Namespace:
        key = hashlib.sha256(f"{self.content_key}\0{what}".encode()).hexdigest()
        return Namespace(key, self.family, self.salt, base=self.content_key)


class NamespaceTracker:
    """Gives the namespace of a model as it is now, under given settings."""

    def __init__(self, model: Any, settings: Mapping[str, Any]) -> None:
        self._model = model
        self._settings = dict(settings)
        self._state: int | None = None
        self._family = ""
        self._keys: dict[str, Namespace] = {}

    def current(self, salt: str) -> Namespace:
        """The namespace for `salt`. Checks weights over again only if they may have changed."""
        state = _change_state(self._model)
        if state != self._state:
            self._family = _family_digest(self._model, self._settings)
            self._state = state
            self._keys.clear()
        if salt not in self._keys:
            if len(self._keys) > 4096:  # salts come from callers: keep their memory bounded
                self._keys.clear()
            digest = hashlib.sha256(f"{self._family}\0{salt}".encode()).hexdigest()
            self._keys[salt] = Namespace(digest, self._family, salt)
        return self._keys[salt]


def _family_digest(model: Any, settings: Mapping[str, Any]) -> str:
    config = {name: value for name, value in model.config.to_dict().items() if name not in _VOLATILE_CONFIG}
    parts = {
        "format": FORMAT_VERSION,
        "weights": weights_digest(model),
        "config": config,
        "class": type(model).__name__,
        "revision": getattr(model.config, "_commit_hash", None),
        "attention": model.config._attn_implementation,
        "device": sorted({parameter.device.type for parameter in model.parameters()}),
        "adapters": [
            _adapter_state(module) for module in model.modules() if "merged_adapters" in module.__dict__
        ],
        "settings": dict(settings),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _change_state(model: Any) -> int:
    """A number that changes when parameters are replaced, written to in place, or re-adapted."""
    state: list[Any] = []
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                version = 0 if parameter.is_inference() else parameter._version
                state.append((id(parameter), version, parameter.data_ptr(), parameter.dtype))
        if "merged_adapters" in module.__dict__:
            state.append(_adapter_state(module))
    return hash(tuple(state))


def _adapter_state(module: torch.nn.Module) -> str:
    return str([module.__dict__.get(name) for name in _ADAPTER_FIELDS])


def weights_digest(model: Any) -> str:
    """Checksum over names, shapes, dtypes and all values of a model's parameters and buffers."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            digest.update(_values_checksum(tensor.detach()))
    return str(digest.hexdigest())


def _values_checksum(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta or tensor.numel() == 0:
        return b""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.device.type == "cpu":
        return xxhash.xxh3_128_digest(raw.numpy().data)
    # On an accelerator the values are summed where they lie, each word times an odd number that
    # depends on its place: changing any one word changes the sum modulo 2**64.
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
    total = 0
    for start in range(0, padded.numel(), _DEVICE_BLOCK):
        words = padded[start : start + _DEVICE_BLOCK].to(torch.int64)
        place = torch.arange(start, start + words.numel(), device=words.device, dtype=torch.int64)
        factors = (place * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1
        total = (total + int((words * factors).sum().item())) % (1 << 64)
    return total.to_bytes(8, "little")
