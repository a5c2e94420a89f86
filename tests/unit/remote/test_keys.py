"""Names in a shared store: told apart by salt, family and kind, and not to be guessed without the salt."""

from __future__ import annotations

import hashlib
import hmac
import re

from hypothesis import example, given
from hypothesis import strategies as st

from kvboost.remote.keys import RemoteKeys, part, tenant_prefix

DIGEST = "ab" * 32
TEXT = st.text(min_size=0, max_size=20)


def all_names(keys: RemoteKeys, digest: str = DIGEST, fingerprint: int = 7) -> list[str]:
    return [keys.record(digest), keys.tail(digest), keys.window(fingerprint)]


def test_the_form_of_a_name() -> None:
    for name in all_names(RemoteKeys("salt", "family")):
        assert re.fullmatch(r"kvb:\d+:[0-9a-f]{32}:[0-9a-f]{40}", name)
        assert name.startswith(tenant_prefix("salt"))
        assert part(name, 3) == f"{name}:3"


def test_names_are_the_same_on_every_machine() -> None:
    """Written down: another version of this code must find what this one wrote."""
    secret = hashlib.sha256(b"ann").digest()

    def name(message: bytes) -> str:
        return hmac.new(secret, message, "sha256").hexdigest()

    prefix = f"kvb:1:{name(b'tenant')[:32]}:"
    assert tenant_prefix("ann") == prefix
    keys = RemoteKeys("ann", "f")
    assert keys.record(DIGEST) == prefix + name(b"record\0f\0" + DIGEST.encode())[:40]
    assert keys.tail(DIGEST) == prefix + name(b"tail\0f\0" + DIGEST.encode())[:40]
    assert keys.window(7) == prefix + name(b"window\0f\0" + (7).to_bytes(8, "little"))[:40]


@given(TEXT, TEXT, TEXT, st.integers(0, 2**64 - 1))
@example("a", "a\0", "family", 7)  # a bare HMAC takes both for the same key
@example("", "\0", "family", 7)
def test_another_salt_never_gives_the_same_names(one: str, other: str, family: str, value: int) -> None:
    names = [set(all_names(RemoteKeys(salt, family), fingerprint=value)) for salt in (one, other)]
    if one == other:
        assert names[0] == names[1]
    else:
        assert not names[0] & names[1]
        parts = [{piece for name in each for piece in name.split(":")[2:]} for each in names]
        assert not parts[0] & parts[1], "not even a piece of a name says that the text is the same"


@given(TEXT, TEXT, TEXT)
def test_another_family_never_gives_the_same_names(salt: str, one: str, other: str) -> None:
    names = [set(all_names(RemoteKeys(salt, family))) for family in (one, other)]
    assert (names[0] == names[1]) if one == other else not names[0] & names[1]


def test_kinds_do_not_meet() -> None:
    """A record, what follows it and a window never share a name, whatever their numbers are."""
    keys = RemoteKeys("salt", "family")
    assert len(set(all_names(keys))) == 3
    assert keys.record("") != keys.tail("")
