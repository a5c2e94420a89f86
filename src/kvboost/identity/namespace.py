"""The namespace digest: whose KV it is. Keys of one digest never serve another.

It covers the name, dtype and values of every parameter and buffer, the config, adapters, device type,
attention implementation, torch's settings for numbers, and all settings that change stored KV. Whether any
of it has changed is `model_state`'s business. Knows no store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvboost.identity.model_state import ModelState, watch_of
from kvboost.locks import fork_safe_lock

FORMAT_VERSION = 2
_TAINTED = "loose"  # as it stands in the keys of stored chunks


@dataclass(frozen=True)
class Namespace:
    """`key` starts every chain. `family` is the same digest without the salt.

    Beside its exact chains a namespace has others, each under a root of its own, whose `base` is the key of
    the namespace: they are found by content or as approximate, never as an exact prefix. `gated` says why
    nothing may be read or stored in the model's present state. `repaired` tells approximate chains apart that
    were repaired otherwise than the engine's options say.
    """

    key: str
    family: str
    salt: str
    base: str = ""
    gated: str = ""
    repaired: str = field(default="", compare=False)

    @property
    def content_key(self) -> str:
        """The key under which text is found by content, whichever chain it stands in."""
        return self.base or self.key

    def at_offset(self, position_offset: int) -> Namespace:
        """The root of text encoded from another position than 0: never a prefix of a prompt."""
        return self._beside(f"offset {position_offset}")

    def tainted(self) -> Namespace:
        """The root of text that was computed while looking at approximate KV."""
        return self._beside(_TAINTED)

    def approximate(self) -> Namespace:
        """The root of the approximate chains: whole prompts put together from parts and repaired."""
        return self._beside(f"approximate {self.repaired}".rstrip())

    def behind(self, digest: str) -> Namespace:
        """The root of text that follows the chunk `digest`, which is not here: never a prefix of a prompt."""
        return self._beside(f"behind {digest}")

    def _beside(self, what: str) -> Namespace:
        key = hashlib.sha256(f"{self.content_key}\0{what}".encode()).hexdigest()
        return Namespace(key, self.family, self.salt, base=self.content_key)


class NamespaceTracker:
    """Gives the namespace of a model as it is now, under given settings."""

    def __init__(self, model: Any, settings: Mapping[str, Any]) -> None:
        self._model = model
        self._settings = dict(settings)
        self.watch = watch_of(model)
        self.watch.read()
        self.watch.check_all()  # others may have watched before: what they overlooked is seen now
        self._lock = fork_safe_lock()
        self._seen = (-1, -1)
        self._surprises = self.watch.read().surprises
        self._distrust = 0
        self._family = ""
        self._keys: dict[str, Namespace] = {}

    def current(self, salt: str) -> Namespace:
        """The namespace for `salt`. Checks weights over again only where they may have changed."""
        return self.of(self.watch.read(), salt)

    def last(self, salt: str) -> Namespace:
        """The namespace for `salt` as of the last reading, for what is to be read again before it counts."""
        with self._lock:
            return self._keys.get(salt) or Namespace("", self._family, salt)

    def of(self, state: ModelState, salt: str) -> Namespace:
        """The namespace for `salt` in a state that was just read."""
        with self._lock:
            if (state.version, state.surprises) != self._seen:
                # Read again, so that digest and state are of one moment, whatever other threads do.
                state, checksums, surroundings = self.watch.read_for()
                if state.surprises != self._surprises:  # of this digest there may be KV that others computed
                    self._surprises = state.surprises
                    self._distrust += 1
                own = {**self._settings, "distrust": self._distrust} if self._distrust else self._settings
                self._family = _family_digest(self._model, own, checksums, surroundings)
                self._seen = (state.version, state.surprises)
                self._keys.clear()
            if salt not in self._keys:
                if len(self._keys) > 4096:  # salts come from callers: keep their memory bounded
                    self._keys.clear()
                digest = hashlib.sha256(f"{self._family}\0{salt}".encode()).hexdigest()
                self._keys[salt] = Namespace(digest, self._family, salt)
            found = self._keys[salt]
        return replace(found, gated=state.gated) if state.gated else found


def _family_digest(
    model: Any, settings: Mapping[str, Any], checksums: Mapping[str, str], surroundings: Any
) -> str:
    parts = {
        "format": FORMAT_VERSION,
        "weights": dict(checksums),
        "surroundings": surroundings,
        "class": type(model).__name__,
        "settings": dict(settings),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_named).encode()).hexdigest()


def _named(value: Any) -> str:
    """What json does not know, in the same words each time: no addresses."""
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
