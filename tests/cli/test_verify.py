"""`kvboost verify`: a table, a verdict, an exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvboost.cli.main import main
from kvboost.kv import rope


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["verify", *arguments])


def test_a_sound_model_is_verified(tiny_folder: str) -> None:
    outcome = run(tiny_folder, "--max-new-tokens", "4", "--chunk-size", "16")
    assert outcome.exit_code == 0, outcome.output
    for word in ("exact reuse", "quantized reuse", "approximate reuse", "attention", "rotation", "bit-exact"):
        assert word in outcome.stdout
    assert "1 of 1 answers equal BASELINE's" in outcome.stdout
    assert "\nverified" in outcome.stdout


def test_json(tiny_folder: str) -> None:
    outcome = run(tiny_folder, "--max-new-tokens", "4", "--chunk-size", "16", "--json")
    assert outcome.exit_code == 0
    found = json.loads(outcome.stdout)
    assert found["passed"] is True
    assert found["failed"] == []


def test_what_is_broken_is_named(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rope.KeyRotation.rotate_

    def wrong(self: Any, slabs: Any, layout: Any, start: int, end: int, shift: Any) -> None:
        right(self, slabs, layout, start, end, shift + 1)

    monkeypatch.setattr(rope.KeyRotation, "rotate_", wrong)
    outcome = run(tiny_folder, "--max-new-tokens", "4", "--chunk-size", "16")
    assert outcome.exit_code == 1
    assert "NOT verified: rotation" in outcome.stdout
    assert "Traceback" not in outcome.output


def test_prompts_from_files(tiny_folder: str, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first prompt\n\nsecond prompt, somewhat longer\n")
    outcome = run(
        tiny_folder, "--prompts", str(lines), "--max-new-tokens", "3", "--chunk-size", "16", "--json"
    )
    assert [each["prompt"] for each in json.loads(outcome.stdout)["prompts"]] == [
        "first prompt",
        "second prompt, somewhat longer",
    ]
    chats = tmp_path / "prompts.jsonl"
    chats.write_text('"just text"\n[{"role": "user", "content": "hello"}]\n')
    outcome = run(
        tiny_folder, "--prompts", str(chats), "--max-new-tokens", "3", "--chunk-size", "16", "--json"
    )
    assert len(json.loads(outcome.stdout)["prompts"]) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.txt", "\n\n", "has no prompts; write one per line"),
        ("bad.jsonl", '"x"\nnonsense\n', "line 2 of"),
        ("bytes.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_bad_files_are_one_line(tiny_folder: str, tmp_path: Path, name: str, text: Any, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    outcome = run(tiny_folder, "--prompts", str(path))
    assert outcome.exit_code == 1
    assert message in " ".join(outcome.stderr.split())
    assert "Traceback" not in outcome.output


def test_a_file_that_is_not_there(tiny_folder: str) -> None:
    outcome = run(tiny_folder, "--prompts", "nowhere.txt")
    assert outcome.exit_code == 2
    assert "does not exist" in outcome.stderr
