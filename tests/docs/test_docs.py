"""The examples of the README run, and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.docs import (
    agents_numbers,
    batch_numbers,
    disk_numbers,
    gpu_numbers,
    peers_numbers,
    quant_numbers,
    questions_numbers,
    readme_numbers,
    remote_numbers,
    reuse_numbers,
    serve_numbers,
)

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.real_model
def test_readme_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    expected = re.findall(r"prints\n\n```text\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    assert len(expected) == 2
    scope: dict[str, object] = {}
    for block, output in zip(blocks, expected, strict=False):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), scope if block is blocks[0] else {})
        assert printed.getvalue() == output
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(blocks[2], "README.md", "exec"), scope)
    engine = scope["engine"]
    engine.cache_manager.check_integrity()  # type: ignore[attr-defined]
    assert (tmp_path / "my-cache" / "cache.json").is_file()


def test_readme_numbers_are_those_of_the_result_file() -> None:
    for made in (readme_numbers.table(), readme_numbers.storing(), readme_numbers.machine()):
        assert made in README


def test_numbers_of_moved_text_are_those_of_the_result_files() -> None:
    document = " ".join((ROOT / "docs" / "how-reuse-works.md").read_text().split())
    for part in reuse_numbers.PARTS:
        assert " ".join(part().split()) in document, part.__name__
    for name in ("quality-cuda", "quality-cpu", "rag-cpu", "encoding-cpu"):
        assert reuse_numbers.machine(name) in document
    assert reuse_numbers.rag_table() in README
    assert reuse_numbers.machine("rag-cpu") in README
    assert reuse_numbers.choice_table() in (ROOT / "docs" / "options.md").read_text()


def test_numbers_of_quantization_are_those_of_the_result_files() -> None:
    document = (ROOT / "docs" / "quantization.md").read_text()
    for part in quant_numbers.PARTS:
        assert part() in document, part.__name__
    for name in ("quant-cpu", "quality-cuda"):
        assert reuse_numbers.machine(name) in document
    assert quant_numbers.readme_line() in README


def test_numbers_of_the_sample_questions_are_those_of_the_result_file() -> None:
    page = questions_numbers.PAGE.read_text()
    assert questions_numbers.with_numbers(page) == page, "run python -m tests.docs.questions_numbers"


def test_numbers_of_agents_are_those_of_the_result_file() -> None:
    page = agents_numbers.PAGE.read_text()
    assert agents_numbers.with_numbers(page) == page, "run python -m tests.docs.agents_numbers"


def test_numbers_of_a_gpu_are_those_of_the_result_files() -> None:
    page = gpu_numbers.PAGE.read_text()
    assert gpu_numbers.with_numbers(page) == page, "run python -m tests.docs.gpu_numbers"
    assert gpu_numbers.readme_line() in README


def test_numbers_of_the_disk_are_those_of_the_result_file() -> None:
    document = (ROOT / "docs" / "disk-cache.md").read_text()
    assert disk_numbers.disk_table() in document
    assert reuse_numbers.machine("disk-cpu") in document
    assert disk_numbers.readme_line() in README


def test_numbers_of_the_shared_store_are_those_of_the_result_files() -> None:
    document = (ROOT / "docs" / "remote.md").read_text()
    assert remote_numbers.answers_table() in document
    assert remote_numbers.reading_table() in document
    assert remote_numbers.answers_table() in README
    for page in (document, README):
        assert reuse_numbers.machine("remote-redis-cpu") in page


def test_numbers_of_batches_are_those_of_the_result_files() -> None:
    batches = " ".join((ROOT / "docs" / "batches.md").read_text().split())
    for part in batch_numbers.PARTS:
        assert " ".join(part().split()) in batches, part.__name__
    for part in (batch_numbers.batch_table, batch_numbers.workload, batch_numbers.memory_line):
        assert " ".join(part("batch-cuda").split()) in batches, part.__name__
    for name in ("batch-cpu", "batch-cuda"):
        assert reuse_numbers.machine(name) in batches
    evaluation = " ".join((ROOT / "docs" / "evaluation.md").read_text().split())
    for part in (batch_numbers.evaluation_table, batch_numbers.evaluation_line):
        assert " ".join(part().split()) in evaluation
    assert reuse_numbers.machine("evaluation-cpu") in evaluation
    assert batch_numbers.readme_line() in README


def test_numbers_of_other_engines_are_those_of_the_result_file() -> None:
    document = (ROOT / "docs" / "performance.md").read_text()
    for part in peers_numbers.PARTS:
        assert part() in document, part.__name__
    assert reuse_numbers.machine("peers-cpu") in document
    assert peers_numbers.peers_table() in README
    for part in serve_numbers.PARTS:
        assert part() in document, part.__name__
    assert reuse_numbers.machine("serve-cpu") in document
    assert reuse_numbers.machine("serve-rag-128-cpu") in document
    for part in serve_numbers.README_LINES:
        assert part() in README, part.__name__
    server = " ".join((ROOT / "docs" / "server.md").read_text().split())
    for part in (serve_numbers.soak_line, serve_numbers.hostile_line, serve_numbers.salts_line):
        assert " ".join(part().split()) in server, part.__name__


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/batches.md",
        "docs/evaluation.md",
        "docs/disk-cache.md",
        "docs/disk-format.md",
        "docs/remote.md",
        "docs/how-reuse-works.md",
        "docs/quantization.md",
        "docs/architecture.md",
        "docs/log.md",
        "docs/recipes/agents.md",
    ],
)
def test_links_exist(name: str) -> None:
    path = ROOT / name
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in link:
            assert (path.parent / link).exists(), link
