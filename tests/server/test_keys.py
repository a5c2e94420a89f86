"""Keys and salts: who may do what, and whose cached text a request may see."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.errors import InvalidRequestError
from kvboost.server.auth import Caller, Gate, effective_salt
from kvboost.server.errors import ApiError
from kvboost.server.settings import ApiKey, ServerSettings
from tests.fixture_types import MakeEngine
from tests.server.running import HELLO, MODEL, Running, Serve

BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 4}
OPEN = [("GET", "/health"), ("GET", "/ready"), ("GET", "/openapi.json")]
USUAL = [("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/v1/chat/completions")]
USUAL += [("POST", "/v1/completions"), ("POST", "/v1/cache/warm"), ("POST", "/v1/cache/explain")]
SHARED = [
    ("GET", "/metrics"),
    ("GET", "/v1/cache/stats"),
    ("POST", "/v1/cache/pin"),
    ("POST", "/v1/cache/unpin"),
]
CLEAR = ("POST", "/v1/cache/clear")


def asked(server: Running, method: str, route: str, key: str | None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    body = None
    if route == "/v1/chat/completions":
        body = BODY
    elif route == "/v1/completions":
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    elif method == "POST" and route != "/v1/cache/clear":
        body = {"prompt": "hi"}
    return server.client.request(method, route, json=body, headers=headers)


def status(server: Running, method: str, route: str, key: str | None) -> int:
    response = asked(server, method, route, key)
    if response.status_code in (401, 403):
        assert response.json()["error"]["code"] in (
            "invalid_api_key",
            "missing_api_key",
            "admin_key_required",
        )
    if response.status_code == 401:
        assert response.headers["www-authenticate"] == "Bearer"
    return response.status_code


# --- who may do what -------------------------------------------------------------------------


def test_without_keys_everything_is_open(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    for method, route in [*OPEN, *USUAL, *SHARED, CLEAR]:
        assert status(server, method, route, None) == 200, route
        assert status(server, method, route, "whatever") == 200, "clients always send some key"
    assert server.client.get("/v1/models", headers={"Authorization": "Basic abc"}).status_code == 200


def test_with_keys_every_request_needs_one(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), api_keys=(ApiKey("one"), ApiKey("two")))
    for method, route in OPEN:
        assert status(server, method, route, None) == 200
    for method, route in [*USUAL, *SHARED, CLEAR]:
        for key in (None, "three", "on", "onee", "One", "one one"):
            assert status(server, method, route, key) == 401, (route, key)
        for key in ("one", "two"):
            assert status(server, method, route, key) == 200, (route, key)


def test_with_an_admin_key_what_concerns_all_needs_it(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), api_keys=(ApiKey("one"),), admin_key=ApiKey("root"))
    for method, route in USUAL:
        assert [status(server, method, route, key) for key in ("one", "root", None)] == [200, 200, 401]
    for method, route in [*SHARED, CLEAR]:
        assert [status(server, method, route, key) for key in ("one", "root", None, "x")] == [
            403,
            200,
            401,
            401,
        ]


def test_an_admin_key_alone(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), admin_key=ApiKey("root"))
    for method, route in USUAL:
        given = (None, "root", "none")  # many clients always send something
        assert [status(server, method, route, key) for key in given] == [200, 200, 200]
    for method, route in [*SHARED, CLEAR]:
        assert [status(server, method, route, key) for key in (None, "root", "x")] == [401, 200, 401]


def test_nobody_clears_what_others_keep_apart(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), api_keys=(ApiKey("one", "a"), ApiKey("two", "b")))
    assert status(server, *CLEAR, "one") == 403
    assert status(server, "GET", "/v1/cache/stats", "one") == 200
    same = serve(make_engine(), api_keys=(ApiKey("one", "a"), ApiKey("two", "a")))
    assert status(same, *CLEAR, "one") == 200


@pytest.mark.parametrize("header", ["one", "Basic one", "Bearer", "bearer: one"])
def test_other_spellings_are_no_key(make_engine: MakeEngine, serve: Serve, header: str) -> None:
    server = serve(make_engine(), api_keys=(ApiKey("one"),))
    assert server.client.get("/v1/models", headers={"Authorization": header}).status_code == 401
    assert server.client.get("/v1/models", headers={"Authorization": "bearer one"}).status_code == 200


def test_all_keys_are_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvboost.server import auth

    compared = 0
    real = auth.hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        assert len(one) == len(other)
        return real(one, other)

    monkeypatch.setattr(auth.hmac, "compare_digest", counting)
    keys = tuple(ApiKey(f"key-{number}") for number in range(5))
    gate = Gate(ServerSettings(api_keys=keys, admin_key=ApiKey("root")))
    for key in ("key-0", "key-4", "root"):
        compared = 0
        gate.caller(key, "")
        assert compared == 6
    for key in ("none of them", ""):
        compared = 0
        with pytest.raises(ApiError) as caught:
            gate.caller(key, "")
        assert (compared, caught.value.status) == (6, 401)
    assert gate.caller("key-2", "") == Caller("key 3")


def test_keys_out_of_text() -> None:
    assert ApiKey.parsed("abc") == ApiKey("abc", "")
    assert ApiKey.parsed("abc:salt:more") == ApiKey("abc", "salt:more")
    assert "abc" not in repr(ApiKey("abc", "salt"))
    assert "salt=***" in repr(ApiKey("abc", "salt"))
    for bad in ("", ":salt", "a b", "é", "a\n"):
        with pytest.raises(InvalidRequestError, match="API key"):
            ApiKey.parsed(bad)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model_name": ""}, "name"),
        ({"mode": "magic"}, "mode"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s"),
        ({"default_max_tokens": 0}, "default_max_tokens"),
        ({"api_keys": (ApiKey("a"), ApiKey("a", "b"))}, "twice"),
        ({"api_keys": (ApiKey("a"),), "admin_key": ApiKey("a")}, "twice"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        ServerSettings(**options)


# --- whose text ------------------------------------------------------------------------------

SALTS = st.text("01:a", max_size=6)


@given(SALTS, SALTS, SALTS, SALTS, SALTS)
def test_no_two_pairs_have_the_same_salt(
    engine: str, key: str, request: str, key2: str, request2: str
) -> None:
    same = effective_salt(engine, key, request) == effective_salt(engine, key2, request2)
    assert same == ((key, request) == (key2, request2))


def test_without_salts_it_is_the_engines_own() -> None:
    assert effective_salt("mine", "", "") == "mine"


def chat_as(server: Running, key: str, salt: str | None = None) -> dict[str, Any]:
    body = BODY if salt is None else {**BODY, "cache_salt": salt}
    response = server.client.post(
        "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    )
    assert response.status_code == 200, response.text
    reuse: dict[str, Any] = response.json()["kvboost"]
    return reuse


@pytest.mark.parametrize("batching", [True, False])
def test_salts_keep_cached_text_apart(make_engine: MakeEngine, serve: Serve, batching: bool) -> None:
    keys = (ApiKey("plain"), ApiKey("same"), ApiKey("ann", "a"), ApiKey("bob", "b"))
    server = serve(make_engine(), api_keys=keys, batching=batching)
    cold: list[tuple[str, str | None]] = [("plain", None), ("ann", None), ("bob", None)]
    cold += [("plain", "a"), ("ann", "a"), ("ann", "b"), ("bob", "a"), ("plain", "1:a")]
    for key, salt in cold:
        reuse = chat_as(server, key, salt)
        assert reuse["cached_tokens"] == 0, (key, salt)
        assert reuse["spans"][0]["reason"] == "never stored", "not even why not"
    for key, salt in cold:
        assert chat_as(server, key, salt)["cached_tokens"] > 0
    assert chat_as(server, "same")["cached_tokens"] > 0, "keys without salts share"
    assert chat_as(server, "plain", "")["cached_tokens"] > 0, "an empty salt is none"


def test_explain_and_warm_and_pin_see_the_callers_text_only(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), api_keys=(ApiKey("ann", "a"), ApiKey("bob", "b")))

    def post(route: str, key: str, **fields: Any) -> dict[str, Any]:
        response = server.client.post(
            f"/v1/cache/{route}",
            json={"messages": HELLO, **fields},
            headers={"Authorization": f"Bearer {key}"},
        )
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    post("warm", "ann")
    assert post("explain", "ann")["cached_tokens"] > 0
    assert post("explain", "bob")["cached_tokens"] == 0
    assert post("explain", "ann", cache_salt="x")["cached_tokens"] == 0
    assert post("pin", "ann")["tokens"] > 0
    assert post("pin", "bob")["tokens"] == 0
    assert post("unpin", "ann")["tokens"] > 0
    assert chat_as(server, "bob")["cached_tokens"] == 0
    assert chat_as(server, "ann")["cached_tokens"] > 0


def test_the_admin_may_act_for_a_key(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), api_keys=(ApiKey("ann", "a"),), admin_key=ApiKey("root"))

    def post(route: str, key: str, **fields: Any) -> httpx.Response:
        return server.client.post(
            f"/v1/cache/{route}",
            json={"messages": HELLO, **fields},
            headers={"Authorization": f"Bearer {key}"},
        )

    assert post("warm", "root", key_salt="a").status_code == 200
    assert chat_as(server, "ann")["cached_tokens"] > 0
    assert post("pin", "root", key_salt="a").json()["tokens"] > 0
    assert post("pin", "root").json()["tokens"] == 0
    assert post("unpin", "root", key_salt="a").json()["tokens"] > 0
    refused = post("explain", "ann", key_salt="b")
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "key_salt")


SECRET = "the password of the safe is hunter2 and the number is 994417 in the end"


def near_miss(server: Running, key: str | None, **fields: Any) -> list[str]:
    """What `key` is told of a prompt that begins as the secret does: by explain, and by an answer."""
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    prompt = SECRET[:40] + "?" * 20
    found = server.client.post("/v1/cache/explain", json={"prompt": prompt, **fields}, headers=headers).json()
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": fields.get("cache_salt")}
    answer = server.client.post("/v1/completions", json=body, headers=headers).json()
    return [found["spans"][-1]["reason"], answer["kvboost"]["spans"][-1]["reason"]]


def written_by(server: Running, key: str | None) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    body = {"model": MODEL, "prompt": SECRET, "max_tokens": 1}
    assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    server.settle()


@pytest.mark.parametrize(
    ("settings", "writer", "reader", "told"),
    [
        ({}, None, None, True),
        ({"admin_key": ApiKey("root")}, None, None, False),
        ({"admin_key": ApiKey("root")}, None, "root", True),
        ({"api_keys": (ApiKey("ann"),)}, "ann", "ann", True),
        ({"api_keys": (ApiKey("ann"),), "admin_key": ApiKey("root")}, "root", "ann", False),
        ({"api_keys": (ApiKey("ann"), ApiKey("bob"))}, "ann", "bob", False),
        ({"api_keys": (ApiKey("ann", "a"), ApiKey("bob", "a"))}, "ann", "bob", False),
        ({"api_keys": (ApiKey("ann", "a"), ApiKey("bob", "b"))}, "ann", "ann", True),
    ],
)
def test_nobody_reads_what_others_wrote_out_of_reasons(
    make_engine: MakeEngine,
    serve: Serve,
    settings: dict[str, Any],
    writer: str | None,
    reader: str | None,
    told: bool,
) -> None:
    """Where a prompt leaves a stored text, the reason may name the token that stands there."""
    server = serve(make_engine(), **settings)
    written_by(server, writer)
    for reason in near_miss(server, reader):
        assert reason.startswith("diverged at token ")
        assert (": expected " in reason) == told


def test_texts_of_chunks_are_told_to_whom_all_belong(make_engine: MakeEngine, serve: Serve) -> None:
    def texts(key: str | None, **settings: Any) -> bool:
        server = serve(make_engine(), log_prompts=True, **settings)
        written_by(server, key)
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        chunks = server.client.get("/v1/cache/stats?chunks=5", headers=headers).json()["chunks"]
        assert chunks
        return all("text" in chunk for chunk in chunks)

    assert texts(None)
    assert texts("ann", api_keys=(ApiKey("ann"),))
    assert texts("root", api_keys=(ApiKey("ann", "a"),), admin_key=ApiKey("root"))
    assert not texts("ann", api_keys=(ApiKey("ann", "a"), ApiKey("bob", "b")))
    assert not texts("ann", api_keys=(ApiKey("ann"), ApiKey("bob")))


def test_text_cached_under_the_engines_salt_is_found(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine(cache_salt="house")
    engine.warm(HELLO)
    server = serve(engine)
    assert server.chat(max_tokens=1)["kvboost"]["cached_tokens"] > 0
    assert server.chat(max_tokens=1, cache_salt="house")["kvboost"]["cached_tokens"] == 0
