"""`kvboost bench serve`: made-up servers as real processes, good and bad, all shown as they are."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvboost.bench import serve, serve_servers
from kvboost.bench.serve_load import Arrival, ServeSettings, Workload, send
from kvboost.bench.serve_numbers import long_summary, percentiles, summary, targets
from kvboost.bench.serve_servers import HTTP_PEER, ServerFailedError, ServerProcess
from kvboost.bench.stream_client import Reply, ask
from kvboost.cli import bench_serve
from kvboost.cli.main import main
from tests.tiny_models import tiny_model, tiny_tokenizer

FAKE = Path(__file__).with_name("fake_server.py")
SMALL = ServeSettings(
    requests=6,
    rate=200.0,
    prefixes=2,
    prefix_tokens=(30, 40),
    tail_tokens=(4, 8),
    new_tokens=5,
    long_tokens=100,
    steady_requests=6,
    steady_rate=100.0,
    steady_new_tokens=10,
    deadline_s=10.0,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer, which is all that the benchmark itself reads."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made-up servers in the places of kvboost's and of transformers'."""
    monkeypatch.setattr(serve_servers, "KVBOOST_COMMAND", (sys.executable, str(FAKE)))
    folder = tmp_path / "peers"
    (folder / HTTP_PEER).mkdir(parents=True)
    about = {
        "label": "transformers serve",
        "python": sys.executable,
        "serve": [str(FAKE), "serve"],
        "environment": {"FAKE_SERVER": "transformers"},
    }
    (folder / HTTP_PEER / "peer.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def start() -> Any:
    """Starts made-up servers that end with the test."""
    started = []

    def begin(behaviour: str = "", *flags: str) -> ServerProcess:
        command = (sys.executable, str(FAKE), "serve", "model", "--port", "{port}", *flags)
        started.append(ServerProcess(command, environment={"FAKE_SERVER": behaviour}))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


def shown(*parts: Any) -> str:
    text = io.StringIO()
    console = Console(file=text, width=100)
    for part in parts:
        console.print(part)
    return text.getvalue()


@pytest.mark.timed
def test_four_servers_and_a_long_prompt(model: str, peers: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    record = serve.run(model, replace(SMALL, rounds=2), peers, lambda *step: steps.append(step))
    assert [step[0] for step in steps] == list(range(10))
    assert steps[0][1] == 10
    assert record["unavailable"] == []
    assert list(record["servers"]) == ["kvboost", "no_batching", "transformers_cb", "transformers"]
    for name, found in record["servers"].items():
        assert found["answered"] == found["requests"] == 12
        assert found["errors"] == []
        assert found["completion_tokens"] == 60
        assert found["tokens_per_s"] > 10
        assert len(found["rounds_tokens_per_s"]) == 2
        assert found["ttft_ms"]["count"] == 12
        assert found["gap_ms"]["count"] == 12 * 4
        assert found["gap_ms"]["p50"] >= 1.5
        assert found["same_text_as_no_batching"] == found["compared"] == 12
        if name.startswith("transformers"):
            assert found["cached_share"] is None
        else:
            assert found["cached_share"] == pytest.approx(0.5, abs=0.02)
    commands = {name: found["command"] for name, found in record["servers"].items()}
    assert "--no-batching" in commands["no_batching"]
    assert "--no-batching" not in commands["kvboost"]
    assert "--continuous-batching" in commands["transformers_cb"]
    assert "--continuous-batching" not in commands["transformers"]
    assert all("float32" in command for command in commands.values())
    long = record["long_prompt"]
    assert long["requests"] == 6
    assert long["unanswered"] == 0
    assert long["without"]["all_ms"]["count"] == 6 * 9
    assert [target["name"] for target in record["targets"]] == [
        "tokens/s: kvboost / no_batching",
        "tokens/s: kvboost / transformers_cb",
        "tokens/s: kvboost / transformers",
        "p99 of gaps: with a long prompt / without",
    ]
    assert record["targets"][0]["met"], "one after the other, and each slower"
    json.dumps(record)
    page = shown(
        bench_serve.servers_table(record), *bench_serve.long_parts(record), bench_serve.notes(record)
    )
    assert "…" not in page
    assert "12/12" in page


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("dies", "closed in the middle|ConnectionReset|IncompleteRead"),
        ("breaks", "the step failed"),
        ("cut", "the stream ended before the answer did"),
        ("hangs", "not answered in 1 s"),
        ("full", "status 429: .*come back later"),
    ],
)
def test_servers_that_fail_are_shown_with_the_reason(
    model: str, peers: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_SERVER", behaviour)
    settings = replace(SMALL, contestants=("kvboost",), long_tokens=0, deadline_s=1.0)
    record = serve.run(model, settings, peers)
    found = record["servers"]["kvboost"]
    assert found["answered"] < found["requests"] == 6
    assert found["errors"]
    assert any(re.search(reason, error) for error in found["errors"]), found["errors"]
    assert record["targets"] == []
    assert found["errors"][0].split("\n")[0][:40] in shown(bench_serve.notes(record)).replace("\n", " ")


def test_servers_that_are_not_there_or_do_not_start(
    model: str, peers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "no_start")
    (peers / HTTP_PEER / "peer.json").unlink()
    (peers / HTTP_PEER / "unavailable.txt").write_text("cannot be installed: no wheel")
    record = serve.run(model, SMALL, peers)
    assert record["servers"] == {}
    assert record["long_prompt"] is None
    reasons = {one["name"]: one["reason"] for one in record["unavailable"]}
    assert reasons["kvboost"] == "ended with exit code 1 (no such model)"
    assert reasons["transformers"] == reasons["transformers_cb"] == "cannot be installed: no wheel"
    page = shown(bench_serve.servers_table(record), bench_serve.notes(record))
    assert "transformers serve is missing: cannot be installed" in page


def test_the_same_seed_gives_the_same_load(tokenizer: Any) -> None:
    workloads = [Workload(tokenizer, replace(SMALL, seed=seed)) for seed in (1, 1, 2)]
    loads = [
        workload.load(workload.beginnings(0), 8, rate=2.0, new_tokens=3, seed=0) for workload in workloads
    ]
    assert loads[0] == loads[1] != loads[2]
    again = workloads[0].load(workloads[0].beginnings(0), 8, rate=2.0, new_tokens=3, seed=0)
    assert [one.at_s for one in again] == [one.at_s for one in loads[0]]
    assert not {one.prompt for one in again} & {one.prompt for one in loads[0]}, "the text is new"
    prompts = [one.prompt for one in loads[0]]
    assert prompts[0][:30] == prompts[2][:30] != prompts[1][:30]
    assert loads[0][0].at_s == 0.0
    assert loads[0][-1].at_s == pytest.approx(3.5, rel=0.9)


def test_requests_are_sent_when_they_are_due(start: Callable[..., ServerProcess]) -> None:
    """A slow server gets the next one all the same, and waiting counts from when it was due."""
    server = start("", "--no-batching")
    load = [Arrival(0.02 * number, "hello", 10) for number in range(5)]

    async def measure() -> list[Reply]:
        await server.wait_until_ready(20.0)
        return await send(server.address, "model", load, 20.0)

    replies = asyncio.run(measure())
    waited = [reply.ttft_s for reply in replies]
    assert all(reply.is_answered for reply in replies)
    assert [round(reply.asked_at - replies[0].asked_at, 3) for reply in replies] == [
        0,
        0.02,
        0.04,
        0.06,
        0.08,
    ]
    assert waited[-1] > 0.2, "four answers of 0.1 s each come before it"


def test_leaving_early_and_odd_answers(start: Callable[..., ServerProcess]) -> None:
    server = start()

    async def measure() -> tuple[Reply, Reply]:
        await server.wait_until_ready(20.0)
        body = {"prompt": "hello", "max_tokens": 1_000}
        left = await ask(server.address, "/v1/completions", body, leave_after=3)
        return left, await ask(server.address, "/nothing")

    left, missing = asyncio.run(measure())
    assert 3 <= len(left.token_times) < 1_000
    assert not left.is_answered
    assert (missing.status, missing.json) == (404, {"status": "ok"})
    server.stop()
    gone = asyncio.run(ask(server.address, "/health"))
    assert gone.status == 0
    assert "ConnectionRefusedError" in str(gone.error)
    with pytest.raises(ServerFailedError, match="exit code"):
        asyncio.run(server.wait_until_ready(1.0))


def reply_at(asked_at: float, *times: float, cached: int | None = None) -> Reply:
    usage: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": len(times)}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return Reply(asked_at, 200, {}, list(times), times[-1] if times else asked_at, "x", "length", usage)


def test_numbers_of_a_server() -> None:
    found = summary([[reply_at(0.0, 1.0, 2.0, cached=50), reply_at(1.0, 3.0, 4.0, cached=100)]])
    assert found["wall_s"] == 4.0
    assert found["tokens_per_s"] == 1.0
    assert found["requests_per_s"] == 0.5
    assert found["cached_share"] == 0.75
    assert found["ttft_ms"]["p50"] == 1_500.0
    assert found["gap_ms"]["high"] == 1_000.0
    two_rounds = summary([[reply_at(0.0, 1.0, 2.0)], [reply_at(0.0, 1.0, 4.0)]])
    assert two_rounds["rounds_tokens_per_s"] == [1.0, 0.5]
    assert two_rounds["tokens_per_s"] == 0.75
    failed = summary([[reply_at(0.0, 1.0), Reply(0.0, error="gone", ended_at=2.0)]])
    assert (failed["answered"], failed["errors"], failed["tokens_per_s"]) == (1, ["gone"], 0.5)
    assert percentiles([]) is None


def test_gaps_while_a_long_prompt_is_read() -> None:
    """Only gaps that overlap with its reading count, and those of the same time without it."""
    steady = [reply_at(100.0, *(100.0 + 0.1 * step for step in range(1, 101)))]
    slow = [200.1 + 0.1 * step for step in range(50)]  # the long prompt comes after 5 s and takes 3 s
    slow += [205.0 + 0.3 * step for step in range(1, 11)]
    slow += [208.0 + 0.1 * step for step in range(1, 41)]
    found = long_summary(steady, [reply_at(200.0, *slow)], reply_at(205.0, 208.0, 208.1))
    assert found["gap_p99_ratio"] == pytest.approx(3.0, rel=0.05)
    assert found["with"]["all_ms"]["p50"] == pytest.approx(100, rel=0.01)
    assert found["with"]["then_ms"]["p50"] == pytest.approx(300, rel=0.01)
    assert found["without"]["then_ms"]["count"] == pytest.approx(31, abs=1)
    assert found["long_ttft_ms"] == 3_000.0
    (target,) = targets({}, found)
    assert target["met"]
    with pytest.raises(ServerFailedError, match="not answered: refused"):
        long_summary(steady, steady, Reply(205.0, error="refused"))


def test_targets_that_are_missed() -> None:
    servers = {
        name: {"tokens_per_s": rate}
        for name, rate in (("kvboost", 30.0), ("no_batching", 16.0), ("transformers", 7.0))
    }
    found = targets(servers, {"gap_p99_ratio": 4.1})
    assert [(target["value"], target["met"]) for target in found] == [
        (1.875, False),
        (4.286, True),
        (4.1, False),
    ]


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    done = CliRunner().invoke(main, ["bench", "serve", "--device", device])
    assert done.exit_code == 2
    assert f"--device {device} cannot be used" in done.output


def test_the_command(model: str, peers: Path, tmp_path: Path) -> None:
    arguments = ["bench", "serve", "--model", model, "--peers-dir", str(peers), "--only", "kvboost"]
    arguments += ["--requests", "4", "--rate", "100", "--prefix-tokens", "30-40", "--tail-tokens", "5"]
    arguments += ["--new-tokens", "3", "--long-tokens", "0", "--serve-flags", "--max-sequences 4"]
    done = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["settings"]["prefix_tokens"] == [30, 40]
    assert record["settings"]["tail_tokens"] == [5, 5]
    command = record["servers"]["kvboost"]["command"]
    assert command[-2:] == ["--max-sequences", "4"]
    assert json.loads((tmp_path / "results" / "serve-cpu.json").read_text()) == record
    for wrong in ("x", "5-3", "0-4"):
        done = CliRunner().invoke(main, ["bench", "serve", "--tail-tokens", wrong])
        assert done.exit_code == 2
        assert "expected something like" in done.output
