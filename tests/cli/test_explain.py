"""`kvboost explain`: colours, abbreviations, the table, JSON and the picture."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kvboost.choices import Origin
from kvboost.cli.explain import show, svg
from kvboost.cli.main import main
from kvboost.reuse.explain import ExplainedSpan, Explanation

DONOR = "0123456789abcdef"
EXPLANATION = Explanation(
    10,
    6,
    (
        ExplainedSpan(0, 4, Origin.EXACT, "one [two] ", "", DONOR, (0, 4), 3),
        ExplainedSpan(4, 5, Origin.EXACT, "three ", "", DONOR, (4, 8), 2),
        ExplainedSpan(5, 6, Origin.RECOMPUTED, "four ", "", "", None, 0),
        ExplainedSpan(6, 10, Origin.LIVE, "five\x1b[31m", "diverged at token 6: expected 7 '\n', got 8"),
    ),
)


def shown(explanation: Explanation, *, full: bool = False, colour: bool = False) -> str:
    output = io.StringIO()
    console = Console(
        file=output,
        width=100,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=False,
    )
    show(explanation, console, full=full)
    return output.getvalue()


def explain(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)], input=stdin)


def test_without_colours_the_origins_are_named() -> None:
    text = shown(EXPLANATION)
    assert "[exact]one [two] three [recomputed]four [live]five␛[31m" in text
    assert "\x1b" not in text
    assert "■ exact 5   ■ approximate 0   ■ recomputed 1   ■ live 4" in text
    assert text.splitlines()[-1] == "6 of 10 tokens would be reused (60%), 4 computed"


def test_every_span_has_a_row() -> None:
    lines = shown(EXPLANATION).splitlines()
    rows = [line.split() for line in lines if line.strip() and line.strip()[0].isdigit()]
    assert rows[0] == ["0-4", "exact", "01234567", "at", "0-4,", "used", "3", "x"]
    assert rows[1][:2] == ["4-5", "exact"]
    assert rows[2] == ["5-6", "recomputed"]
    assert "diverged at token 6: expected 7 '␊', got 8" in " ".join(rows[3])


def test_on_a_terminal_the_origins_are_colours() -> None:
    text = shown(EXPLANATION, colour=True)
    assert "\x1b[32mone [two] three \x1b[0m\x1b[35mfour \x1b[0m\x1b[31mfive␛[31m\x1b[0m" in text
    assert "[exact]" not in text


def test_long_prompts_are_cut_in_the_middle() -> None:
    text = "α" * 500 + "β" * 1_000 + "γ" * 500
    long = Explanation(9, 0, (ExplainedSpan(0, 9, Origin.LIVE, text, "never stored"),))
    short = "".join(shown(long).split())
    assert "ααα[...1,400charactersleftout...]γγγ" in short
    assert [short.count(letter) for letter in "αβγ"] == [300, 0, 300]
    assert shown(long, full=True).count("β") == 1_000


def test_many_spans_are_cut_in_the_middle() -> None:
    spans = tuple(ExplainedSpan(n, n + 1, Origin.EXACT, "x", "", DONOR, (n, n + 1)) for n in range(100))
    many = Explanation(101, 100, (*spans, ExplainedSpan(100, 101, Origin.LIVE, "y", "never stored")))
    text = shown(many)
    assert "77 spans left out" in text
    assert " 11-12 " in text
    assert " 12-13 " not in text
    assert " 100-101 " in text
    assert " 12-13 " in shown(many, full=True)


def test_the_picture_is_whole_and_needs_nothing_else() -> None:
    picture = svg(EXPLANATION)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "@font-face" not in picture
    assert "recomputed" in picture
    assert picture == svg(EXPLANATION)


@pytest.mark.parametrize("arguments", [["builtin"], ["builtin", "hi", "--prompt-file", __file__]])
def test_bad_usage_is_refused_before_loading(arguments: list[str]) -> None:
    outcome = explain(*arguments)
    assert outcome.exit_code == 2
    assert "--prompt-file" in outcome.stderr


def test_a_near_miss_names_the_token(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("The lamp is lit before sunset.\n")
    picture = tmp_path / "picture.svg"
    arguments = (tiny_folder, "-", "--warm", tmp_path / "known.txt", "--chunk-size", "16")
    outcome = explain(*arguments, "--svg", picture, stdin="The lamp is lit after sunset.\n")
    assert outcome.exit_code == 0, outcome.stderr
    assert "[exact]The lamp is lit [live]after sunset." in outcome.stdout
    assert "diverged at token 16" in outcome.stdout
    assert "16 of 29 tokens would be reused (55%), 13 computed" in outcome.stdout
    assert "diverged" in picture.read_text()
    document = json.loads(explain(*arguments, "--json", stdin="The lamp is lit after sunset.").stdout)
    assert [span["origin"] for span in document["spans"]] == ["exact", "live"]
    assert document["cached_tokens"] == 16
    assert document["spans"][1]["reason"].endswith("'b', got " + document["spans"][1]["reason"][-6:])


def test_a_saved_cache_is_looked_into_and_not_changed(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("The lamp is lit before sunset.")
    cache = tmp_path / "cache"
    warmed = CliRunner().invoke(
        main, ["warm", tiny_folder, str(tmp_path / "known.txt"), "--cache", str(cache)]
    )
    assert warmed.exit_code == 0, warmed.stderr
    before = {path: path.read_bytes() for path in cache.iterdir()}
    outcome = explain(tiny_folder, "The lamp is lit at noon.", "--cache", cache, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["cached_tokens"] == 16
    assert {path: path.read_bytes() for path in cache.iterdir()} == before


def test_no_cache_and_an_empty_text_are_errors(tiny_folder: str, tmp_path: Path) -> None:
    outcome = explain(tiny_folder, "hi", "--cache", tmp_path)
    assert outcome.exit_code == 1
    assert "holds no saved cache" in outcome.stderr
    (tmp_path / "empty.txt").write_text("")
    outcome = explain(tiny_folder, "hi", "--warm", tmp_path / "empty.txt")
    assert outcome.exit_code == 1
    assert "empty.txt was left out" in outcome.stderr
