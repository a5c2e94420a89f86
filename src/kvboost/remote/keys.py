"""Names under which a shared store keeps things: keyed by the salt, so that other tenants cannot guess them.

`kvb:<version>:<tenant>:<name>`, where tenant and name are HMACs under the salt. Who knows the model, the
tokens and this code, but not the salt, can name nothing. Knows digests, no store and no tensors.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from functools import lru_cache

import torch
import transformers

from kvboost.identity.namespace import Namespace

VERSION = 1
_TENANT_HEX = 32
_NAME_HEX = 40


@dataclass(frozen=True)
class RemoteKeys:
    """The names of one tenant's KV of one family (model, dtype, encoding)."""

    salt: str
    family: str

    @classmethod
    def of(cls, namespace: Namespace, form: str) -> RemoteKeys:
        """The names of KV of a namespace that is kept in a certain form (types, heads, bits).

        Machines with other versions of torch or transformers have other names.
        """
        return cls(namespace.salt, f"{namespace.family} {form} {_versions()}")

    @property
    def prefix(self) -> str:
        """What all names of the tenant begin with, whatever the model."""
        return tenant_prefix(self.salt)

    def record(self, digest: str) -> str:
        """The record of the chunk with that chain digest; its parts are `part(name, number)`."""
        return self.prefix + self._name("record", digest.encode())

    def tail(self, digest: str) -> str:
        """What was read last behind the chunk with that chain digest."""
        return self.prefix + self._name("tail", digest.encode())

    def window(self, fingerprint: int) -> str:
        """Where text with a window of that fingerprint stands."""
        return self.prefix + self._name("window", fingerprint.to_bytes(8, "little"))

    def _name(self, what: str, value: bytes) -> str:
        message = b"\0".join([what.encode(), self.family.encode(), value])
        return hmac.digest(_secret(self.salt), message, "sha256").hex()[:_NAME_HEX]


def part(record: str, number: int) -> str:
    """The name of one part of a record."""
    return f"{record}:{number}"


@lru_cache(maxsize=1)
def _versions() -> str:
    """Releases that may compute other numbers from the same weights."""
    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    return " ".join(f"{name} {'.'.join(text.split('.')[:2])}" for name, text in found.items())


def _secret(salt: str) -> bytes:
    """The key of a salt. As it stands, a salt would have the HMACs of the same one with a zero behind it."""
    return hashlib.sha256(salt.encode()).digest()


@lru_cache(maxsize=1024)
def tenant_prefix(salt: str) -> str:
    """What all names of a salt begin with; for rules of access (`~prefix*` in a Redis ACL)."""
    tenant = hmac.digest(_secret(salt), b"tenant", "sha256").hex()[:_TENANT_HEX]
    return f"kvb:{VERSION}:{tenant}:"
