"""The programs in examples/ run, and show what they say they show."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from kvboost import KVBoost
from kvboost.proof.fresh_engine import fresh_engine

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def example(name: str) -> ModuleType:
    path = next(path for path in EXAMPLES if path.stem == name)
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_are_short_programs(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") < 40
    assert text.startswith('"""')
    assert 'if __name__ == "__main__":\n    main(' in text
    assert f"test_{path.stem}" in globals()


@pytest.mark.real_model
def test_chat(real: KVBoost, capsys: pytest.CaptureFixture[str]) -> None:
    chat = example("chat")
    results = chat.main(real)
    assert len(results) == len(chat.QUESTIONS)
    for earlier, later in pairwise(results):
        # all of the turn before, its answer included, but for the last token, whose KV nobody needed
        assert later.cached_tokens >= earlier.prompt_tokens + earlier.generated_tokens - 1
        assert {span.origin.value for span in later.spans} == {"exact", "live"}
    printed = capsys.readouterr().out
    assert all(result.output_text in printed for result in results)


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.real_model
def test_rag_reordered(real: KVBoost, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = example("rag_reordered").main(real)
    assert first.cached_tokens == 0
    assert sum(span.length for span in second.spans) == second.prompt_tokens
    printed = capsys.readouterr().out
    assert "never stored" in printed
    if real.model.device.type == "cpu":  # on a GPU computing may be cheaper than repair
        assert second.cached_tokens > second.prompt_tokens // 2
        assert 0 < second.recomputed_tokens < second.cached_tokens // 2
        assert "approximate" in printed
        assert "recomputed" in printed


@pytest.mark.real_model
def test_few_shot_evaluation(real: KVBoost, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = example("few_shot_evaluation")
    scores = evaluation.main(real)
    assert len(scores) == len(evaluation.QUESTIONS) * len(evaluation.CHOICES)
    assert sum(score.cached_tokens for score in scores) > sum(score.prompt_tokens for score in scores) // 2
    printed = capsys.readouterr().out
    assert f"{len(evaluation.QUESTIONS)} of {len(evaluation.QUESTIONS)} right" in printed


@pytest.mark.real_model
def test_service_with_disk(real: KVBoost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives = []

    def opened(folder: str) -> KVBoost:
        lives.append(fresh_engine(real, disk_cache_dir=folder, disk_cache_bytes=200_000_000))
        return lives[-1]

    first, second = example("service_with_disk").main(str(tmp_path / "kv-cache"), opened)
    assert len(lives) == 2
    assert first.cached_tokens == 0
    assert second.cached_tokens > second.prompt_tokens * 0.8
    assert {span.origin.value for span in second.spans} == {"exact", "live"}
    assert "tokens from the cache" in capsys.readouterr().out
    for engine in lives:
        engine.cache_manager.check_integrity()


@pytest.mark.real_model
def test_own_generate_loop(real: KVBoost, capsys: pytest.CaptureFixture[str]) -> None:
    loop = example("own_generate_loop")
    first, second = loop.main(real)
    assert first == 0
    shared = len(real.tokenize(loop.LIST * 4))
    assert second >= shared - 1
    assert "chunks stored: 1" in capsys.readouterr().out
