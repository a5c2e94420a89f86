"""`kvboost generate`: where the prompt comes from, what is printed where, what goes wrong how."""

from __future__ import annotations

import json
import logging as python_logging
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvboost.cli import session
from kvboost.cli.generate import summary
from kvboost.cli.main import main
from kvboost.errors import KVBoostError
from kvboost.models import GenerationResult


def generate(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", *arguments], input=stdin)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["builtin"], "--prompt-file"),
        (["builtin", "hi", "--prompt-file", __file__], "--prompt-file"),
        (["builtin", "hi", "--temperature", "0.5"], "--do-sample"),
        (["builtin", "hi", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["builtin", "hi", "--mode", "magic"], "--mode"),
        (["builtin", "--prompt-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_bad_usage_is_refused_before_loading(arguments: list[str], named: str) -> None:
    outcome = generate(*arguments)
    assert outcome.exit_code == 2
    assert named in outcome.stderr


def test_a_prompt_file_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe\x00")
    outcome = generate("builtin", "--prompt-file", str(tmp_path / "prompt"))
    assert outcome.exit_code == 2
    assert "UTF-8" in outcome.stderr


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    outcome = generate(str(tmp_path / "nothing"), "hi")
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("error: cannot load ")
    assert outcome.stderr.count("\n") == 1
    assert outcome.stdout == ""


@pytest.mark.parametrize("error", [OSError, ValueError, ImportError, RuntimeError, AssertionError])
def test_what_loading_raises_becomes_one_error(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error("reason")

    monkeypatch.setattr("kvboost.engine.InferenceEngine.from_pretrained", fail)
    with (
        pytest.raises(KVBoostError, match="cannot load some-model: reason"),
        session.opened_engine("some-model", {}),
    ):
        pass


def test_warnings_are_one_line_and_transformers_is_quiet_only_inside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def warn(*_arguments: object, **_options: object) -> None:
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (python_logging.ERROR, False)
        warnings.simplefilter("always")
        warnings.warn("not\n tested", stacklevel=1)
        raise KVBoostError("enough")

    monkeypatch.setattr("kvboost.engine.InferenceEngine.from_pretrained", warn)
    with pytest.raises(KVBoostError, match="enough"), session.opened_engine("some-model", {}):
        pass
    assert capsys.readouterr().err == "warning: not tested\n"
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_summary_is_one_line() -> None:
    result = GenerationResult(
        "prefix_cache", "p", "o", 5, 120.4, 1500.0, 3.3, 0.5, 10, 5, finish_reason="stop"
    )
    assert summary(result) == (
        "5 tokens in 1.50 s, first after 120 ms; 5 of 10 prompt tokens from the cache; ended by stop"
    )


@pytest.mark.real_model
def test_answer_on_stdout_and_summary_on_stderr() -> None:
    outcome = generate("builtin", "-", "--max-new-tokens", "2", stdin="The capital of France is\n")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout == " Paris.\n"
    assert outcome.stderr.startswith("2 tokens in ")
    assert outcome.stderr.count("\n") == 1


@pytest.mark.real_model
def test_json_from_a_file_as_chat(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Name a colour.\n")
    outcome = generate(
        *("builtin", "--prompt-file", str(tmp_path / "prompt.txt"), "--chat", "--json"),
        *("--max-new-tokens", "3", "--do-sample", "--temperature", "0.7", "--seed", "1"),
        *("--mode", "prefix_cache", "--chunk-size", "16"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["model"] == "builtin"
    assert document["mode"] == "prefix_cache"
    assert document["generated_tokens"] == len(document["token_ids"]) <= 3
    assert "user\nName a colour.<|im_end|>" in document["prompt"]
    assert outcome.stderr == ""


@pytest.mark.real_model
def test_the_engines_refusal_is_one_line() -> None:
    outcome = generate("builtin", "hi", "--max-new-tokens", "9000")
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("error: prompt and max_new_tokens need ")
    assert outcome.stderr.count("\n") == 1
