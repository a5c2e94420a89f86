"""Web pages from elsewhere: what a browser sends for them is refused, programs are not concerned."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from kvboost.server.asgi import host_name, is_foreign
from kvboost.server.settings import ApiKey
from tests.fixture_types import MakeEngine
from tests.server.running import Running, Serve, wait_for


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({}, False),  # a program
        ({"origin": "http://127.0.0.1:8000"}, False),
        ({"origin": "http://127.0.0.1:3000"}, True),
        ({"origin": "http://evil.example"}, True),
        ({"origin": "null"}, True),
        ({"origin": "http://let.in"}, False),
        ({"origin": "http://let.in", "sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),
    ],
)
def test_foreign_pages(headers: dict[str, str], foreign: bool) -> None:
    assert is_foreign(Headers({"host": "127.0.0.1:8000", **headers}), ("http://let.in",)) == foreign
    assert not is_foreign(Headers({"host": "127.0.0.1:8000", **headers}), ("*",))


@pytest.mark.parametrize(
    ("header", "name"),
    [("LocalHost:8000", "localhost"), ("[::1]:8000", "::1"), ("10.0.0.1", "10.0.0.1"), ("", ""), ("[", "")],
)
def test_host_names(header: str, name: str) -> None:
    assert host_name(header) == name


def test_a_foreign_page_changes_nothing(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    server.complete("a text that is worth keeping for a while", max_tokens=1)
    before = server.stats()["cache"]["chunks"]
    assert before > 0
    evil = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    refused = server.client.post("/v1/cache/clear", headers=evil)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert server.stats()["cache"]["chunks"] == before
    assert server.client.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200, "a link"
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert server.client.post("/v1/cache/clear", headers=own).json() == {"chunks": 0}


def test_a_foreign_name_is_refused_without_keys(make_engine: MakeEngine, serve: Serve) -> None:
    def status(server: Running, host: str, **headers: str) -> int:
        return server.client.get("/v1/models", headers={"Host": host, **headers}).status_code

    server = serve(make_engine(), allowed_hosts=("kv.example.org",))
    known = ("localhost:8000", "127.0.0.1", "[::1]:8000", "192.168.1.5:8000", "gpubox:8000", "box.local")
    assert [status(server, host) for host in known] == [200] * len(known)
    assert status(server, "KV.example.org:443") == 200
    assert status(server, "evil.example") == 403
    refused = server.client.get("/v1/models", headers={"Host": "evil.example:8000"})
    assert refused.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in refused.json()["error"]["message"]
    assert status(serve(make_engine(), allowed_hosts=("*",)), "evil.example") == 200
    keyed = serve(make_engine(), api_keys=(ApiKey("ann"),))
    assert status(keyed, "any.example", Authorization="Bearer ann") == 200


def test_addresses_in_the_log_are_addresses(
    make_engine: MakeEngine, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """A client may claim to stand behind a proxy."""
    caplog.set_level("INFO")
    server = serve(make_engine())
    server.client.get("/v1/models", headers={"X-Forwarded-For": "admin \x1b[31mred"})
    wait_for(lambda: "unknown address" in caplog.text)  # the line comes after the answer
    assert "\x1b" not in caplog.text
    server.client.get("/v1/models", headers={"X-Forwarded-For": "10.1.2.3"})
    wait_for(lambda: "10.1.2.3" in caplog.text)
