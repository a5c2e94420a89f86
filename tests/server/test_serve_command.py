"""`kvboost serve` on the command line: flags, names, and errors in one line."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvboost.choices import GenerationMode
from kvboost.cli.main import main
from kvboost.cli.options import size
from kvboost.cli.serve import _name_of, read_keys, with_memory
from kvboost.server import runner
from kvboost.server.settings import MODES, ApiKey, ServerSettings


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--mode", "magic"], "--mode"),
        (["--max-sequences", "0"], "--max-sequences"),
        (["--timeout", "0"], "--timeout"),
        (["--max-request-bytes", "many"], "--max-request-bytes"),
        (["--max-request-bytes", "0"], "--max-request-bytes"),
        (["--admin-key", "key:salt"], "--admin-key"),
        (["--chunk-size", "0"], "--chunk-size"),
    ],
)
def test_bad_usage_is_refused_before_loading(arguments: list[str], named: str) -> None:
    outcome = serve("builtin", *arguments)
    assert outcome.exit_code == 2
    assert named in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--api-key", "a", "--api-key", "a"], "given twice"),
        (["--api-key", ":salt"], "API key must be"),
        (["--api-key", "@/no/such/file"], "/no/such/file cannot be read: No such file"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
    ],
)
def test_errors_are_one_line(arguments: list[str], said: str) -> None:
    outcome = serve("builtin", *arguments)
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("error: ")
    assert said in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_port_in_use_is_told_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = serve("/no/such/model", "--port", str(port))
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert outcome.stderr.count("\n") == 1


def test_a_missing_model_is_one_line() -> None:
    outcome = serve("/no/such/model", "--port", "0")
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("error: cannot load /no/such/model")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    outcome = serve("builtin")
    assert outcome.exit_code == 1
    assert "needs uvicorn: pip install uvicorn" in outcome.stderr


def test_modes_are_the_engines() -> None:
    assert set(MODES) == {mode.value for mode in GenerationMode}
    assert ServerSettings().mode_name == MODES[0]


@pytest.mark.parametrize(
    ("text", "expected"), [("4MB", 4_000_000), ("512KiB", 524_288), ("1 gb", 10**9), ("77", 77), ("3k", 3000)]
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


def test_keys_from_flags_and_files(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# for the team\nann:a\n\n bob \n")
    assert read_keys(("one", f"@{tmp_path / 'keys'}", "two:t")) == [
        ApiKey("one"),
        ApiKey("ann", "a"),
        ApiKey("bob"),
        ApiKey("two", "t"),
    ]


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert _name_of(str(tmp_path / "my-model")) == "my-model"
    assert _name_of("org/model") == "org/model"


def test_the_cache_has_room_unless_told_otherwise() -> None:
    options = with_memory({"chunk_size": 64})
    assert options["max_chunks"] is None
    assert options["max_cache_bytes"] > 0
    for given in ({"max_chunks": 5}, {"max_cache_bytes": None}):
        assert with_memory(dict(given)) == given


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:{}"), ("0.0.0.0", "http://127.0.0.1:{}"), ("::1", "http://[::1]:{}")],
)
def test_addresses(host: str, url: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    with runner.listening_socket(host, 0) as sock:
        assert runner.url_of(sock) == url.format(sock.getsockname()[1])


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class StopError(Exception):
        """Enough was seen."""

    def make_server(_engine: Any, settings: ServerSettings, _on_ready: Any) -> None:
        seen.update(vars(settings))
        raise StopError

    class Engine:
        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_error: object) -> None:
            """Nothing to close."""

    def load(_model: str, options: Any) -> Engine:
        seen["engine"] = options
        return Engine()

    monkeypatch.setattr(runner, "make_server", make_server)
    monkeypatch.setattr("kvboost.cli.session._load", load)
    (tmp_path / "folder").mkdir()
    flags = "--port 0 --mode baseline --no-batching --max-sequences 3 --batch-tokens 999 --max-waiting 7 "
    flags += "--timeout 1.5 --shutdown-timeout 2 --max-request-bytes 1MB --default-max-tokens 9 "
    flags += "--read-timeout 3.5 --keep-alive 4.5 --max-messages 11 "
    flags += "--max-prompt-characters 12 --max-waiting-per-key 5 --log-prompts --max-chunks 4 "
    flags += "--cors https://a.example --cors https://b.example "
    flags += "--allowed-host kv.example --api-key a:b --api-key c --admin-key d"
    outcome = serve(str(tmp_path / "folder"), *flags.split())
    assert isinstance(outcome.exception, StopError)
    assert seen == {
        "model_name": "folder",
        "aliases": (str(tmp_path / "folder"),),
        "mode": GenerationMode.BASELINE,
        "api_keys": (ApiKey("a", "b"), ApiKey("c")),
        "admin_key": ApiKey("d"),
        "batching": False,
        "max_sequences": 3,
        "batch_tokens": 999,
        "max_waiting": 7,
        "timeout_s": 1.5,
        "shutdown_timeout_s": 2.0,
        "max_request_bytes": 1_000_000,
        "read_timeout_s": 3.5,
        "keep_alive_s": 4.5,
        "max_messages": 11,
        "max_prompt_characters": 12,
        "max_waiting_per_tenant": 5,
        "cors_origins": ("https://a.example", "https://b.example"),
        "allowed_hosts": ("kv.example",),
        "log_prompts": True,
        "default_max_tokens": 9,
        "engine": {"max_chunks": 4},
    }
