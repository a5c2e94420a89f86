"""What is said of a bucket that cannot be asked: which kind of failure, and no settings."""

from __future__ import annotations

import pytest

from kvboost.remote.byte_store import DENIED, FAILED, TIMEOUT, UNREACHABLE, StoreError

obstore = pytest.importorskip("obstore", reason="a shared store in S3 needs obstore")

SETTINGS = "\n\nDebug source:\nGeneric { retry_timeout: 2s, connect_timeout: 1s }"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("GenericError", "Error performing GET: error sending request", UNREACHABLE),
        ("GenericError", "Error performing GET: operation timed out", TIMEOUT),
        ("GenericError", "Server returned non-2xx status code: 500", FAILED),
        ("PermissionDeniedError", "Access Denied", DENIED),
    ],
)
def test_kinds_of_failures(kind: str, text: str, reason: str) -> None:
    from kvboost.remote import s3_store

    error = s3_store._store_error(getattr(obstore.exceptions, kind)(text + SETTINGS))
    assert error.reason == reason
    assert "retry_timeout" not in str(error)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told as an answer that came too late, so requests went on asking."""
    from kvboost.remote.s3_store import S3Store

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    store = S3Store("s3://kvboost/x?endpoint=http://127.0.0.1:9")
    with pytest.raises(StoreError) as caught:
        store.peek(["a"], 1)
    store.close()
    assert caught.value.reason == UNREACHABLE
