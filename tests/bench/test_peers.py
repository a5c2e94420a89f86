"""`kvboost bench peers`: the real protocol with made-up peers, good and bad, all shown as they are."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from benchmarks.suite import peers
from benchmarks.suite.commands import peers as bench_peers
from benchmarks.suite.peer_process import PeerFailedError, PeerProcess
from benchmarks.suite.peer_prompts import PeerSettings
from kvboost.bench.serve_servers import HTTP_PEER, reason_not_there
from tests.tiny_models import VOCAB, tiny_model

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
SMALL = PeerSettings(
    lengths=(48, 96),
    rounds=2,
    plain_rounds=1,
    new_tokens=3,
    quality_prompts=1,
    reordered=1,
    documents=3,
    document_tokens=80,
    pause_s=0.0,
    deadline_s=5.0,
)
WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(PEERS)!r})
from protocol import Clock, Peer, answered, packed, serve, versions

class Fake(Peer):
    warmed, answers = 0, 0

    def load(self, model, gguf, context_tokens, threads):
        print("chatter that must not reach the benchmark")
        {{load}}
        about = {{{{"versions": versions(), "note": f"{{{{threads}}}} threads"}}}}
        return {{{{**about, "approximate": {{approximate}}}}}}

    def warm(self, token_ids, text):
        self.warmed += 1
        {{warm}}
        return {{{{}}}}

    def answer(self, token_ids, text, new_tokens, distribution):
        self.answers += 1
        {{answer}}
        clock = Clock()
        time.sleep(0.002)
        for _ in range(new_tokens):
            clock.token()
        logits = packed([{{bias}}] + [0.0] * {VOCAB - 1}) if distribution else None
        return answered(clock, {{said}}, logits=logits, reused_tokens=len(token_ids) - 20)

serve(Fake())
"""
# The model of these tests says token 0 and nothing else, with equal logits for all tokens.
GOOD = {"said": "token_ids=[0] * new_tokens"}
TEXT_ONLY = {"said": 'text="", reported_ttft_ms=0.5', "approximate": "True"}  # token 0 is special: no text
WRONG = {"said": "token_ids=[7] * new_tokens", "bias": "5.0"}
CRASHES = {"answer": "if self.answers == 3: print('out of luck', file=sys.stderr, flush=True); os._exit(3)"}
HANGS = {"warm": "time.sleep(600)"}
FAILS = {"load": "raise ValueError('no such model')"}

MakePeer = Callable[..., Path]


@pytest.fixture
def make_peer(tmp_path: Path) -> MakePeer:
    def make(name: str, *, script: str | None = None, **parts: str) -> Path:
        folder = tmp_path / "peers" / name
        folder.mkdir(parents=True)
        none = {"load": "pass", "warm": "pass", "answer": "pass", "approximate": "False", "bias": "0.0"}
        text = script if script is not None else WORKER.format(**{**none, **GOOD, **parts})
        (folder / "worker.py").write_text(text)
        about = {"label": name.title(), "python": sys.executable, "worker": "worker.py"}
        (folder / "peer.json").write_text(json.dumps(about))
        return folder

    return make


def constant_model() -> Any:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model


def process(folder: Path, tokenizer: Any, deadline_s: float = 5.0) -> PeerProcess:
    return PeerProcess(folder, tokenizer, threads=1, deadline_s=deadline_s)


def shown(*parts: Any) -> str:
    text = io.StringIO()
    console = Console(file=text, width=80)
    for part in parts:
        console.print(part)
    return text.getvalue()


def test_peers_good_and_bad_in_one_run(
    make_engine: Callable[..., Any], make_peer: MakePeer, tmp_path: Path
) -> None:
    make_peer("good")
    make_peer("text", **TEXT_ONLY)
    make_peer("wrong", **WRONG)
    make_peer("crashing", **CRASHES)
    make_peer("failing", **FAILS)
    (tmp_path / "peers" / "vllm").mkdir()
    (tmp_path / "peers" / "vllm" / "unavailable.txt").write_text("cannot be installed:\n no wheel\n")
    (tmp_path / "peers" / "llama_cpp").mkdir()  # an installation that was interrupted
    (tmp_path / "peers" / HTTP_PEER).mkdir()  # a server, which another benchmark asks
    (tmp_path / "peers" / HTTP_PEER / "peer.json").write_text('{"label": "server", "serve": []}')
    engine = make_engine(model=constant_model(), recompute_strategy="cacheblend")
    steps: list[tuple[int, int, str]] = []
    record = peers.run(engine, "tiny", SMALL, tmp_path / "peers", lambda *step: steps.append(step))

    assert max(step[0] for step in steps) < 7 == steps[0][1]
    assert {one["name"]: one["reason"] for one in record["unavailable"]} == {
        "vllm": "cannot be installed: no wheel",
        "llama_cpp": "not set up; run make peers",
        "kvboost_pypi": "not set up; run make peers",
        "failing": "load: ValueError: no such model",
        "crashing": "answer: ended with exit code 3 (out of luck)",
    }
    ours = ["plain", "hand_made", "kvboost", "kvboost_copied"]
    first, second = record["lengths"]
    assert list(first["contestants"]) == [*ours, "crashing", "good", "text", "wrong"]
    assert first["contestants"]["crashing"]["ttft_ms"]["count"] == 1  # what it did before is not lost
    assert list(second["contestants"]) == [*ours, "good", "text", "wrong"]
    for name, found in second["contestants"].items():
        assert found["ttft_ms"]["count"] == (1 if name == "plain" else 2)
        assert found["compared_with_plain"] == found["first_token_prompts"] == 1
        assert found["same_tokens_as_plain"] == (0 if name == "wrong" else 1)
        assert found["reused_tokens"] == (0 if name == "plain" else 96)
        assert found["compared_by"] == ("text" if name == "text" else "token ids")
        if name == "wrong":
            assert found["first_token_kl"] > 0.1
        else:
            assert found["first_token_kl"] < 1e-6
    assert second["contestants"]["text"]["reported_ttft_ms"]["median"] == 0.5
    assert second["contestants"]["good"]["reported_ttft_ms"] is None
    reordered = record["reordered"]["contestants"]
    ours = [f"{selector} {share}" for selector in ("guided", "deviation") for share in ("5%", "15%", "30%")]
    assert set(reordered) == {"plain", *ours, "text"}
    assert max(reordered[name]["reused_tokens"] for name in ours) > 100  # where it is cheaper than computing
    assert all(reordered[name]["first_token_kl"] is not None for name in ours)
    for item in record["lengths"]:
        profile = dict(item["kvboost_profile"])
        assert all(time > 0 for time in profile.values()), profile
        assert sum(profile.values()) == pytest.approx(2 * profile["ttft_ms"], rel=0.01)
    assert record["prompts"] == record["prompts_that_read_back"] == 15  # 2 x (1 + 2 + 1 + 3) + 1
    assert record["peers"]["good"]["note"] == "1 threads"
    assert record["peers"]["good"]["versions"]["python"]
    json.dumps(record)

    page = shown(
        bench_peers.peers_table(record), *bench_peers.reordered_parts(record), bench_peers.notes(record)
    )
    assert "…" not in page
    assert "Crashing is missing: answer: ended with exit code 3" in page
    assert "vLLM (CPU) is missing: cannot be installed: no wheel" in page
    assert "0/1" in page


@pytest.mark.timed
def test_a_peer_that_hangs_is_killed_at_its_deadline(make_peer: MakePeer, tokenizer: Any) -> None:
    peer = process(make_peer("hanging", **HANGS), tokenizer)
    peer.load("tiny", None, 100)
    peer._deadline_s = 0.2
    started = time.monotonic()
    with pytest.raises(PeerFailedError, match=r"warm: no reply in 0.2 s"):
        peer.warm([10, 11])
    with pytest.raises(PeerFailedError):
        peer.warm([10, 11])
    peer.close()
    assert time.monotonic() - started < 3
    assert peer._process.returncode == -9


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('hello'); input()", "a reply that is no JSON: 'hello"),
        ("raise SystemExit(4)", "ended with exit code 4"),
        ("import nothing_of_that_name", r"exit code 1 \(ModuleNotFoundError: No module named"),
    ],
)
def test_scripts_that_are_no_workers(make_peer: MakePeer, tokenizer: Any, script: str, reason: str) -> None:
    peer = process(make_peer("strange", script=script), tokenizer)
    with pytest.raises(PeerFailedError, match=reason):
        peer.load("tiny", None, 100)
    peer.close()


def test_a_peer_ends_when_it_is_asked_to(make_peer: MakePeer, tokenizer: Any) -> None:
    peer = process(make_peer("good"), tokenizer)
    peer.load("tiny", None, 100)
    turn = peer.turn([10, 11, 12], 3, distribution=True)
    assert turn.token_ids == [0, 0, 0]
    assert turn.logits is not None
    assert turn.logits.tolist() == [0.0] * VOCAB
    peer.close()
    assert peer._process.returncode == 0


def length(shared: int, **medians: float) -> dict[str, Any]:
    return {
        "shared_tokens": shared,
        "contestants": {name: {"ttft_ms": {"median": median}} for name, median in medians.items()},
    }


def test_targets_are_missed_where_others_are_faster() -> None:
    found = peers.targets(
        [
            length(1_024, plain=900.0, kvboost=100.0, kvboost_copied=50.0, llama_cpp=60.0),
            length(4_096, plain=900.0, hand_made=99.0, kvboost=100.0, llama_cpp=90.0, vllm=120.0),
        ]
    )
    assert [(one["name"], one["met"]) for one in found] == [
        ("1,024: kvboost / best (llama_cpp)", False),
        ("4,096: kvboost / plain", True),
        ("4,096: kvboost / hand_made", False),
        ("4,096: kvboost / llama_cpp", True),
        ("4,096: kvboost / vllm", True),
    ]


def test_the_command(
    make_peer: MakePeer, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)  # no pauses between turns
    make_peer("good")
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    arguments = "--lengths 40 --rounds 1 --plain-rounds 5 --new-tokens 2 --quality-prompts 1 --reordered 0"
    arguments += f" --model {tmp_path / 'tiny'} --peers-dir {tmp_path / 'peers'} --out {tmp_path / 'out'}"
    outcome = CliRunner().invoke(bench_peers.peers, [*arguments.split(), "--chunk-size", "16"])
    assert outcome.exit_code == 0, outcome.output
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "out" / "peers-cpu.json").read_text())
    assert record["lengths"][0]["contestants"]["kvboost"]["same_tokens_as_plain"] == 1
    assert record["lengths"][0]["contestants"]["kvboost"]["first_token_kl"] < 1e-6
    assert record["lengths"][0]["contestants"]["good"]["first_token_same"] in (0, 1)
    assert record["reordered"] is None
    assert "llama.cpp is missing: not set up; run make peers" in outcome.stdout


def test_defaults_are_those_of_the_settings() -> None:
    """Flags are written out, so that help needs no torch."""
    settings = PeerSettings()
    for option in bench_peers.peers.params:
        name = {"deadline": "deadline_s"}.get(str(option.name), str(option.name))
        if hasattr(settings, name):
            value = getattr(settings, name)
            assert option.default == (",".join(map(str, value)) if name == "lengths" else value), name


def test_what_cannot_be_installed_is_noted_and_no_error(tmp_path: Path) -> None:
    script = [str(PEERS / "setup.sh"), str(tmp_path / "peers")]
    environment = {**os.environ, "PYTHON": "false"}
    done = subprocess.run([*script, "llama_cpp"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    reason = reason_not_there(tmp_path / "peers" / "llama_cpp")
    assert reason is not None
    assert reason.startswith("cannot be installed:")
    assert reason in done.stdout
    assert subprocess.run([*script, "unheard_of"], env=environment, capture_output=True).returncode == 2
