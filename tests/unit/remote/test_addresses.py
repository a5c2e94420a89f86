"""Addresses of shared stores: what is one, what is said of another, and no password in any message."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import InvalidRequestError
from kvboost.remote.byte_store import ByteStore, open_store
from kvboost.settings import EngineSettings
from kvboost.store_address import check_remote_address, without_password

SECRET = "s3cr3t-w0rd"


def opened(address: str) -> ByteStore:
    pytest.importorskip("redis" if not address.startswith("s3") else "obstore")
    store = open_store(address)
    store.close()
    store.close()
    return store


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("redis://host", "redis://host"),
        (f"redis://:{SECRET}@host:6380/2", "redis://host:6380/2"),
        (f"rediss://me:{SECRET}@host", "rediss://host"),
        (f"redis://host/?password={SECRET}", "redis://host/"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
        (f"unix://:{SECRET}@/run/redis.sock", "unix:///run/redis.sock"),
        (f"redis+cluster://:{SECRET}@host:7000", "redis+cluster://host:7000"),
        ("s3://bucket/a/b?region=eu-west-1", "s3://bucket/a/b"),
        ("s3://bucket?endpoint=http://127.0.0.1:9", "s3://bucket"),
    ],
)
def test_addresses(address: str, shown: str) -> None:
    """Opening one sends nothing: nobody listens here."""
    assert check_remote_address(address) == address
    assert opened(address).name == shown


@pytest.mark.parametrize(
    "address",
    [
        f"http://me:{SECRET}@host",
        f"me:{SECRET}@host:6379",
        f"redis:/me:{SECRET}@host",
        f"http://host?password={SECRET}",
        "",
        None,
        5,
    ],
)
def test_what_is_no_address(address: Any) -> None:
    with pytest.raises(InvalidRequestError, match="remote_cache must be an address") as caught:
        check_remote_address(address)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        f"redis://me:{SECRET}@host:port",
        f"redis://me:{SECRET}@host:99999999",
        f"redis://me:{SECRET}/more@host:6379",  # not escaped, as it must be
        f"redis://me:{SECRET}#more@host:6379",
        f"redis://me:{SECRET}?more@host:6379",
        f"redis://me:{SECRET}@[host",
        f"redis+cluster://me:{SECRET}/more@host:6379",
        f"redis://host?password=a@{SECRET}",
        f"redis://me:{SECRET}@host?socket_timeout=soon",
        f"s3://key:{SECRET}@bucket?surprise=1",
        f"s3://key:{SECRET}@?region=x",
        "s3://",
    ],
)
def test_addresses_that_cannot_be_used(address: str) -> None:
    """In one line that says which option, and without the password."""
    said = _opened_or_said(address)
    assert SECRET not in said
    assert "remote_cache" in said or said.startswith(address.partition("://")[0])


def _opened_or_said(address: str) -> str:
    try:
        return opened(address).name
    except InvalidRequestError as error:
        return str(error)


def test_without_password() -> None:
    assert without_password(f"redis://a:b@c@{'host'}:1/x") == "redis://host:1/x"


def test_settings() -> None:
    with pytest.raises(InvalidRequestError, match="remote_cache"):
        EngineSettings(remote_cache="ftp://x")
    with pytest.raises(InvalidRequestError, match='remote_write must be "all" or "reused"'):
        EngineSettings(remote_cache="redis://x", remote_write="some")
    assert SECRET not in repr(EngineSettings(remote_cache=f"redis://:{SECRET}@host"))
