"""`benchmarks/ab`: which numbers are compared, the interval, and that each side runs its own code.

The checkouts are made up: a kvboost of a few lines whose times are in its source.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.comparison import ratios, worker
from benchmarks.comparison.checkouts import CheckoutError, opened
from benchmarks.comparison.ratios import Comparison, NothingToCompareError
from benchmarks.comparison.sides import Side

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "ab"
ENGINE = """
import time
from types import SimpleNamespace

TIME_MS = {time_ms}


class KVBoost:
    calls = 0
    seen = set()

    @classmethod
    def from_pretrained(cls, name, **options):
        if options.pop("max_chunks") is not None or options:
            raise ValueError(f"unknown option {{min(options)}}")
        return cls()

    def tokenize(self, text):
        return list(text.encode())

    def warm(self, ids):
        self.warmed = len(ids)

    def generate(self, ids, max_new_tokens, min_new_tokens, mode="default"):
        KVBoost.calls += 1
        cached = 0 if mode == "baseline" else self.warmed
        return SimpleNamespace(
            ttft_ms=TIME_MS, total_ms=TIME_MS * 3, cached_tokens=cached, generated_tokens=max_new_tokens
        )

    def generate_batch(self, prompts, max_new_tokens, min_new_tokens):
        assert len({{tuple(prompt[:50]) for prompt in prompts}} - KVBoost.seen) == 3, "prefixes are new"
        KVBoost.seen |= {{tuple(prompt[:50]) for prompt in prompts}}
        assert len(prompts) == 7 and {{len(prompt) for prompt in prompts}} == {{54}}
        time.sleep(TIME_MS / 1000)
        return [self.generate(prompt, max_new_tokens, min_new_tokens, "baseline") for prompt in prompts]
"""
COMMAND = """
import json, os, subprocess, sys, time
import click
import transformers
from kvboost import TIME_MS


@click.group()
def main():
    pass


@main.group()
def bench():
    pass


@bench.command()
@click.option("--pairs", default=1)
@click.option("--wait", default=0.0)
def quick(pairs, wait):
    subprocess.run([sys.executable, "-S", "-c", "print('a child speaks')"], check=True)
    transformers.AutoModelForCausalLM.from_pretrained("a", dtype="b")
    time.sleep(wait)
    click.echo("a table")
    record = {"settings": {"pause_s": 3}, "pairs": pairs, "a_ms": {"median": TIME_MS, "low": 0}}
    record |= {"tokens_per_s": 1000 / TIME_MS, "never_s": 0.0, "process": os.getpid()}
    record["loads"] = transformers.AutoModelForCausalLM.loads
    click.echo(json.dumps(record))


@bench.command()
def serving():
    code = "import kvboost; print(kvboost.TIME_MS)"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.run([sys.executable, "-c", code], env=inherited, capture_output=True, check=True)
    click.echo(json.dumps({"served_ms": float(server.stdout)}))


@bench.command()
def failing():
    click.secho("error: no luck", err=True)
    click.get_current_context().exit(1)
"""
TRANSFORMERS = """
class AutoModelForCausalLM:
    loads = 0

    @classmethod
    def from_pretrained(cls, *names, **options):
        cls.loads += 1
        return cls()


class AutoTokenizer(AutoModelForCausalLM):
    pass
"""


def make_checkout(folder: Path, time_ms: float) -> Path:
    """A checkout whose benchmarks say `time_ms`."""
    files = {
        "kvboost/__init__.py": ENGINE.format(time_ms=time_ms),
        "kvboost/cli/__init__.py": "",
        "kvboost/cli/main.py": COMMAND,
        "transformers.py": TRANSFORMERS,
    }
    for name, text in files.items():
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tags slow (20 ms) and fast (10 ms), and another checkout's files on top."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "--quiet")
    for name, time_ms in (("slow", 20.0), ("fast", 10.0)):
        make_checkout(folder, time_ms)
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", name)
        git(folder, "tag", name)
    make_checkout(folder, 1.0)
    return folder


def start(repository: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--repository", str(repository), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(repository: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; nothing may be left behind."""
    process = start(repository, *arguments)
    out, err = process.communicate(timeout=60)
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert "Traceback" not in err
    return process.returncode, out, err


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "ranks", "coverage"),
    [
        (1, (1, 1), 0.0),
        (5, (1, 5), 0.9375),
        (6, (1, 6), 0.96875),
        (15, (4, 12), 0.96484375),
        (20, (6, 15), 0.95861),
    ],
)
def test_interval_is_that_of_the_tables(count: int, ranks: tuple[int, int], coverage: float) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(count).shuffle(values)
    low, high, sure = ratios.median_interval(values)
    assert (low, high) == ranks
    assert sure == pytest.approx(coverage, abs=1e-5)


def test_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(7)
    hits = 0
    for _ in range(2_000):
        low, high, coverage = ratios.median_interval([draw.lognormvariate(0, 0.3) for _ in range(15)])
        hits += low <= 1 <= high
    assert hits / 2_000 == pytest.approx(coverage, abs=0.02)


def test_ratio_is_that_of_pairs_not_of_medians() -> None:
    comparison = Comparison("a_ms", (10.0, 100.0, 1.0), (11.0, 50.0, 2.0))
    assert comparison.ratio == pytest.approx(1.1)
    record = comparison.as_record()
    assert (record["old_median"], record["new_median"]) == (10.0, 11.0)
    assert (record["low"], record["high"]) == (0.5, 2.0)


@pytest.mark.parametrize(
    "path", ["a.ttft_ms.median", "ms_per_token", "x.seconds", "tokens_per_s", "fill_us_per_chunk"]
)
def test_times_and_rates_are_known_by_their_units(path: str) -> None:
    assert ratios.is_timing(path)
    assert ratios.is_rate(path) == (path == "tokens_per_s")


@pytest.mark.parametrize(
    "path", ["ttft_ms.low", "ttft_ms.count", "cached_tokens", "kl_mean", "speedups", "items.0"]
)
def test_other_numbers_are_not_compared(path: str) -> None:
    assert not ratios.is_timing(path)


def test_entries_of_a_list_are_called_by_what_tells_them_apart() -> None:
    lengths = [{"shared_tokens": 64, "a_ms": 1}, {"shared_tokens": 128, "a_ms": 2}]
    record = {"machine": {"boot_s": 1}, "lengths": lengths, "plain": [{"a_ms": 3}, 4], "is_s": True}
    assert dict(ratios.numbers(record)) == {
        "lengths.64.shared_tokens": 64,
        "lengths.64.a_ms": 1,
        "lengths.128.shared_tokens": 128,
        "lengths.128.a_ms": 2,
        "plain.0.a_ms": 3,
        "plain.1": 4,
    }
    assert ratios.choose(record, {"lengths": lengths[:1]}) == ["lengths.64.a_ms"]
    assert ratios.choose(record, record, ["*.a_ms", "plain.1"])[-1] == "plain.1"


def test_every_committed_result_is_read() -> None:
    for name in ("prefix", "chat", "batch", "disk", "lookup", "rag", "serve", "quant"):
        record = json.loads((ROOT / "benchmarks" / "results" / f"{name}-cpu.json").read_text())
        assert ratios.choose(record, record), name


def test_nothing_in_common_is_said() -> None:
    with pytest.raises(NothingToCompareError, match=r"no time and no rate in common.* there are: tokens"):
        ratios.choose({"tokens": 1, "a_ms": 1}, {"tokens": 1, "b_ms": 2})
    with pytest.raises(NothingToCompareError, match=r"--metric c\* matches no number"):
        ratios.choose({"a_ms": 1}, {"a_ms": 2}, ["a*", "c*"])


# --- the worker's parts --------------------------------------------------------------------------


def test_unknown_options_go_to_the_engine() -> None:
    words = ["--dtype", "bfloat16", "--chunk-size=64", "--bit-exact", "--no-strict", "--max-chunks", "none"]
    assert worker.keywords(words) == {
        "dtype": "bfloat16",
        "chunk_size": 64,
        "bit_exact": True,
        "strict": False,
        "max_chunks": None,
    }
    with pytest.raises(worker.WorkerError, match="expected an option"):
        worker.keywords(["here"])


def test_shared_tokens_are_as_many_as_asked_for_and_always_the_same() -> None:
    ids = worker.shared_tokens(lambda text: list(text.encode()), 5_000)
    assert len(ids) == 5_000
    assert ids[:100] == worker.shared_tokens(lambda text: list(text.encode()), 100)


# --- checkouts -----------------------------------------------------------------------------------


def test_worktrees_are_removed_even_after_an_error(repository: Path) -> None:
    with contextlib.suppress(RuntimeError), opened(repository, "slow", "slow") as (old, new):
        assert old.commit == new.commit == git(repository, "rev-parse", "slow").strip()
        assert old.folder != new.folder
        assert old.source.is_dir()
        raise RuntimeError
    assert not old.folder.exists()
    assert not new.folder.parent.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_folder_is_taken_as_it_is(repository: Path) -> None:
    with opened(repository, str(repository), "fast") as (old, new):
        assert (old.folder, old.commit) == (repository, None)
    assert repository.is_dir()
    assert not new.folder.exists()


def test_what_is_no_checkout_is_said(repository: Path, tmp_path: Path) -> None:
    for given, message in (
        ("nowhere", "neither a folder nor a revision"),
        (str(tmp_path), "without src/kvboost"),
    ):
        with pytest.raises(CheckoutError, match=message), opened(repository, "slow", given):
            pass


# --- the command ---------------------------------------------------------------------------------


def test_each_side_runs_its_own_code_in_one_process(repository: Path) -> None:
    status, out, err = run(repository, "slow", "fast", "quick", "--pairs", "3", "--json", "--metric", "*")
    assert status == 0
    record = json.loads(out)  # nothing else on stdout, not even what a child prints
    metrics = record["metrics"]
    assert set(metrics["a_ms.median"]["old"]) == {20.0}
    assert metrics["a_ms.median"]["ratio"] == 0.5
    assert metrics["tokens_per_s"]["ratio"] == 2.0
    assert len(set(metrics["process"]["old"])) == len(set(metrics["process"]["new"])) == 1
    assert metrics["process"]["old"] != metrics["process"]["new"]
    assert set(metrics["loads"]["old"] + metrics["loads"]["new"]) == {1.0}  # four runs, one load
    assert record["pairs"] == 3
    assert record["old"]["commit"] == git(repository, "rev-parse", "slow").strip()
    assert err.count("/src/kvboost/__init__.py") == 2
    assert "never_s" not in metrics


def test_servers_that_a_side_starts_run_its_code_too(repository: Path) -> None:
    status, out, err = run(repository, "slow", "fast", "serving", "--pairs", "1", "--json")
    assert status == 0, err
    found = json.loads(out)["metrics"]["served_ms"]
    assert (found["old"], found["new"]) == ([20.0], [10.0])


def test_table_and_options_behind_the_dashes(repository: Path) -> None:
    arguments = ("fast", str(repository), "quick", "--pairs", "2", "--warm-ups", "0", "--", "--pairs", "7")
    status, out, _ = run(repository, *arguments)
    assert status == 0
    record = json.loads(out.splitlines()[-1])
    assert record["comparison"] == ["quick", "--pairs", "7"]
    assert set(record["metrics"]) == {"a_ms.median", "tokens_per_s"}
    assert "order statistics of the pair ratios, 50% for the median of 2 pairs" in " ".join(out.split())
    assert "tokens_per_s (a rate)" in out
    assert "Too few for 95%: take six or more." in " ".join(out.split())
    assert "Left out, because not above 0 in every run: never_s" in out


@pytest.mark.parametrize(
    ("name", "metric", "old"), [("warm", "ttft_ms", 20.0), ("decode", "ms_per_token", 40 / 31)]
)
def test_benchmarks_of_our_own_and_their_limit(repository: Path, name: str, metric: str, old: float) -> None:
    status, out, err = run(
        repository, "slow", "fast", name, "--pairs", "2", "--tokens", "50", "--at-most", "0.4"
    )
    assert status == 1
    record = json.loads(out.splitlines()[-1])
    assert statistics.median(record["metrics"][metric]["old"]) == pytest.approx(old)
    assert record["metrics"][metric]["ratio"] == pytest.approx(0.5)
    assert record["exceeded"] == [metric]
    assert f"above 0.4: {metric}" in err


def test_who_is_not_asked_stands_still(repository: Path) -> None:
    with opened(repository, "slow", "fast") as (old, _), Side(old, ["warm"]) as side:
        process = psutil.Process(side._process.pid)
        side.check_import()
        side.prepare()
        for _ in range(2):
            assert side.measure()["ttft_ms"] == 20.0
            until = time.monotonic() + 10
            while process.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
                time.sleep(0.01)
            assert process.status() == psutil.STATUS_STOPPED
    assert not process.is_running()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_nobody_is_left_standing(repository: Path, number: int) -> None:
    command = start(repository, "slow", "fast", "quick", "--wait", "60", start_new_session=True)
    parent = psutil.Process(command.pid)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        workers = parent.children(recursive=True)
        if any(each.status() == psutil.STATUS_STOPPED for each in workers if each.is_running()):
            break
        time.sleep(0.02)
    else:
        pytest.fail("nobody stood still")
    folders = git(repository, "worktree", "list", "--porcelain")
    os.kill(command.pid, number)
    command.communicate(timeout=30)
    assert not psutil.wait_procs(workers, timeout=10)[1]
    for line in folders.splitlines():  # of a command that was killed they stay
        path = Path(line.removeprefix("worktree "))
        if path.parent.name.startswith("kvboost-ab-"):
            shutil.rmtree(path.parent, ignore_errors=True)
    git(repository, "worktree", "prune")


def test_batches_behind_new_beginnings(repository: Path) -> None:
    options = ("--tokens", "50", "--tail-tokens", "4", "--prompts", "7", "--prefixes", "3", "--repeat", "2")
    status, out, _ = run(repository, "slow", "fast", "together", "--pairs", "2", *options)
    assert status == 0
    metrics = json.loads(out.splitlines()[-1])["metrics"]
    assert set(metrics) == {"seconds", "tokens_per_s"}
    for old, rate in zip(metrics["seconds"]["old"], metrics["tokens_per_s"]["old"], strict=True):
        assert old >= 0.02
        assert rate == pytest.approx(7 * 32 / old)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'OLD'"),
        (("slow", "fast"), "Missing argument 'BENCH...'"),
        (("slow", "fast", "warm", "--pairs", "0"), "Invalid value for '--pairs'"),
        (("slow", "nowhere", "warm"), "nowhere is neither a folder nor a revision"),
        (("slow", "fast", "nothing"), "OLD (slow): No such command 'nothing'"),
        (("slow", "fast", "failing"), "OLD (slow): no luck"),
        (("slow", "fast", "warm", "--tokens", "x"), "expected a whole number of at least 1, got 'x'"),
        (("slow", "fast", "warm", "--depth", "3"), "OLD (slow): ValueError: unknown option depth"),
        (("slow", "fast", "warm", "--mode", "baseline"), "only 0 of 1024 tokens"),
        (("slow", "fast", "quick", "--at-most", "1"), "tokens_per_s is a rate: choose with --metric"),
    ],
)
def test_errors_in_a_line(repository: Path, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = run(repository, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_another_kvboost_on_the_path_is_an_error(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkout(tmp_path, 5.0)
    (tmp_path / "start").mkdir()
    lines = f"import sys\nsys.path.insert(0, {str(tmp_path / 'src')!r})\n"
    (tmp_path / "start" / "sitecustomize.py").write_text(lines)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "start"))
    status, _, err = run(repository, "slow", "fast", "warm")
    assert status == 2
    assert "OLD (slow): kvboost was imported from" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(repository: Path, tmp_path: Path, number: int) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with start(repository, "slow", "fast", "quick", "--wait", "60", env=environment) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]  # both sides are there
        workers = [child.pid for child in psutil.Process(process.pid).children()]
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert ["old: slow" in lines[0], "new: fast" in lines[1], len(workers)] == [True, True, 2]
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    for worker_pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker_pid, 0)
