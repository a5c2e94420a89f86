"""`kvboost warm`, `kvboost stats` and `generate --cache`: a cache that outlives the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost.cli.disk import uses_histogram
from tests.cli.command import kvboost
from tests.engine.reuse_checks import pay_always

TEXT = "The lamp is lit thirty minutes before sunset."  # the tiny tokenizer has a token per byte
TOKEN_SIZE = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n")
    return path


@pytest.fixture
def cache(tmp_path: Path, tiny_folder: str, text_file: Path) -> Path:
    folder = tmp_path / "cache"
    outcome = kvboost("warm", tiny_folder, text_file, "--cache", folder, "--chunk-size", "16")
    assert outcome.exit_code == 0, outcome.stderr
    return folder


def stats_of(cache: Path) -> dict[str, object]:
    outcome = kvboost("stats", "--cache", cache, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    found: dict[str, object] = json.loads(outcome.stdout)
    return found


# --- warm ------------------------------------------------------------------------------------


def test_warm_says_what_it_read_and_kept(tiny_folder: str, tmp_path: Path, text_file: Path) -> None:
    outcome = kvboost("warm", tiny_folder, text_file, "--cache", tmp_path / "c", "--chunk-size", "16")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout == (
        f"{text_file}: tokens: {len(TEXT)}, chunks: 3\n{tmp_path / 'c'}: chunks: 3, from before: 0\n"
    )
    assert outcome.stderr == ""


def test_warm_adds_to_what_is_there(tiny_folder: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "more.txt").write_text("Dogs stay in the boat.")
    outcome = kvboost(
        *("warm", tiny_folder, tmp_path / "more.txt", "--cache", cache, "--chunk-size", "16", "--json")
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert json.loads(outcome.stdout) == {
        "model": tiny_folder,
        "cache": str(cache),
        "files": [{"file": str(tmp_path / "more.txt"), "tokens": 22, "chunks": 2}],
        "loaded_chunks": 3,
        "saved_chunks": 5,
        "lost_chunks": 0,
    }
    assert outcome.stderr == ""


def test_a_file_that_cannot_be_used_is_left_out(tiny_folder: str, tmp_path: Path, text_file: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    outcome = kvboost("warm", tiny_folder, tmp_path / "empty.txt", text_file, "--cache", tmp_path / "c")
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith(f"error: {tmp_path / 'empty.txt'} was left out: the prompt is empty")
    assert stats_of(tmp_path / "c")["tokens"] == len(TEXT)


def test_a_limit_that_was_given_holds_and_is_said(tiny_folder: str, tmp_path: Path, text_file: Path) -> None:
    outcome = kvboost(
        *("warm", tiny_folder, text_file, "--cache", tmp_path / "c", "--chunk-size", "16"),
        *("--max-chunks", "2"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stderr.startswith("warning: 1 chunks could not be kept")
    assert stats_of(tmp_path / "c")["chunks"] == 2


def test_documents_are_read_behind_a_text(tiny_folder: str, tmp_path: Path) -> None:
    pages = [tmp_path / f"{name}.txt" for name in ("mill", "ferry", "empty")]
    texts = ["The mill grinds on Mondays, when the wind is good. " * 2, "The ferry leaves at eight. " * 4, ""]
    for page, text in zip(pages, texts, strict=True):
        page.write_text(text)
    (tmp_path / "system.txt").write_text("Answer from the documents.")
    arguments = (
        "--documents",
        "--behind",
        tmp_path / "system.txt",
        "--cache",
        tmp_path / "c",
        "--chunk-size",
        "16",
    )
    outcome = kvboost("warm", tiny_folder, *pages, *arguments, "--json")
    assert outcome.exit_code == 1, "one of them is empty"
    assert f"{pages[2]} was left out: the document is empty" in outcome.stderr
    files = json.loads(outcome.stdout)["files"]
    assert [each.get("tokens") for each in files] == [len(texts[0]), len(texts[1]), None]
    prompt = "Answer from the documents." + texts[0] + "Why?"
    outcome = kvboost(
        *("generate", tiny_folder, prompt, "--cache", tmp_path / "c", "--chunk-size", "16", "--json"),
        *("--max-new-tokens", "2"),
    )
    assert json.loads(outcome.stdout)["cached_tokens"] >= len(prompt) - len("Why?")
    again = kvboost("warm", tiny_folder, *pages[1::-1], *arguments)
    assert again.exit_code == 0, again.stderr
    assert again.stdout.startswith(f"{pages[1]}: tokens: {len(texts[1])}, chunks: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--behind"], "give --documents too"), (["--documents", "--chat"], "give --behind too")],
)
def test_flags_that_need_others(text_file: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    flags = [*flags, str(text_file)] if flags == ["--behind"] else flags
    outcome = kvboost("warm", "no/such/model", text_file, "--cache", tmp_path / "c", *flags)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


@pytest.mark.parametrize("command", ["warm", "generate"])
def test_a_folder_of_other_things_is_refused_before_loading(
    command: str, tmp_path: Path, text_file: Path
) -> None:
    last = text_file if command == "warm" else "hello"
    outcome = kvboost(command, "no/such/model", last, "--cache", tmp_path)
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith(f"error: {tmp_path} holds other files and no saved cache")


def test_another_models_cache_is_refused_by_name(cache: Path, tiny_folder: str, text_file: Path) -> None:
    outcome = kvboost("warm", tiny_folder, text_file, "--cache", cache, "--dtype", "bfloat16")
    assert outcome.exit_code == 1
    assert "was saved for the model" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


# --- generate --------------------------------------------------------------------------------


def test_generate_reads_the_cache_and_adds_to_it(tiny_folder: str, cache: Path) -> None:
    arguments = ("generate", tiny_folder, TEXT + " Why?", "--cache", cache, "--chunk-size", "16", "--json")
    first, second = (json.loads(kvboost(*arguments, "--max-new-tokens", "4").stdout) for _ in range(2))
    assert first["cached_tokens"] == len(TEXT)
    assert second["cached_tokens"] == len(TEXT) + 4
    assert first["token_ids"] == second["token_ids"]


def test_generate_makes_the_cache(tiny_folder: str, tmp_path: Path) -> None:
    outcome = kvboost("generate", tiny_folder, TEXT, "--cache", tmp_path / "new", "--max-new-tokens", "4")
    assert outcome.exit_code == 0, outcome.stderr
    assert stats_of(tmp_path / "new")["tokens"] == len(TEXT) + 3  # the last token's KV is never computed


def test_baseline_leaves_the_cache_alone(tiny_folder: str, tmp_path: Path) -> None:
    outcome = kvboost(
        *("generate", tiny_folder, TEXT, "--cache", tmp_path / "new", "--mode", "baseline"),
        *("--max-new-tokens", "2"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert not (tmp_path / "new").exists()


def test_a_damaged_chunk_is_said_and_left_out(tiny_folder: str, cache: Path) -> None:
    header = json.loads((cache / "cache.json").read_text())
    header["chunks"][1]["size"] += 1
    (cache / "cache.json").write_text(json.dumps(header))
    outcome = kvboost(
        *("generate", tiny_folder, TEXT, "--cache", cache, "--max-new-tokens", "2", "--chunk-size", "16")
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert f"warning: 2 chunks of {cache} are damaged, or follow one" in outcome.stderr


# --- stats -----------------------------------------------------------------------------------


def test_stats_in_numbers(cache: Path) -> None:
    found = stats_of(cache)
    assert found["chunks"] == 3
    assert found["tokens"] == len(TEXT)
    assert found["kv_bytes"] == len(TEXT) * TOKEN_SIZE
    assert found["disk_bytes"] == sum(path.stat().st_size for path in cache.iterdir())
    assert found["namespaces"] == 1
    assert found["chunks_by_uses"] == {"0": 3}
    assert found["missing_files"] == []
    assert len(str(found["namespace"])) == 64


def test_stats_as_a_table(cache: Path) -> None:
    outcome = kvboost("stats", "--cache", cache)
    assert outcome.exit_code == 0, outcome.stderr
    for piece in ("chunks      3", f"tokens      {len(TEXT)}", "34.6 kB in RAM", "used 0 x", "█ 3"):
        assert piece in outcome.stdout
    assert str(stats_of(cache)["namespace"])[:12] in outcome.stdout


def test_a_missing_shard_is_named(cache: Path) -> None:
    (shard,) = cache.glob("*.records")
    shard.unlink()
    assert stats_of(cache)["missing_files"] == [shard.name]
    assert "missing" in kvboost("stats", "--cache", cache).stdout


@pytest.mark.parametrize(
    "change",
    [{"chunks": [{"length": "many"}]}, {"chunks": [3]}],
    ids=["length", "row"],
)
def test_a_damaged_header_is_one_line(cache: Path, change: dict[str, object]) -> None:
    header = json.loads((cache / "cache.json").read_text())
    (cache / "cache.json").write_text(json.dumps({**header, **change}))
    outcome = kvboost("stats", "--cache", cache)
    assert outcome.exit_code == 1
    assert "damaged" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_stats_of_nothing(tmp_path: Path) -> None:
    outcome = kvboost("stats", "--cache", tmp_path / "none")
    assert outcome.exit_code == 1
    assert "holds no saved cache" in outcome.stderr


def test_small_parts() -> None:
    assert uses_histogram([0, 0, 1, 2, 3, 9, 1000]) == {"0": 2, "1": 1, "2-3": 2, "8-15": 1, "512-1023": 1}


@pytest.mark.parametrize("as_json", [False, True])
def test_approximate_reuse_is_told_in_one_line(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    pay_always(monkeypatch)
    text = "The boat leaves at nine and comes back at four. In winter it stays at the pier, as do dogs."
    (tmp_path / "text.txt").write_text(text)
    cache = ("--cache", str(tmp_path / "cache"), "--chunk-size", "16")
    assert kvboost("warm", tiny_folder, tmp_path / "text.txt", *cache).exit_code == 0
    flags = [*cache, "--max-new-tokens", "3", *(["--json"] if as_json else [])]
    outcome = kvboost("generate", tiny_folder, f"Listen. {text} When?", *flags)
    assert outcome.exit_code == 0, outcome.stderr
    (line,) = [each for each in outcome.stderr.splitlines() if each.startswith("warning: ")]
    assert "prompt tokens were reused approximately" in line
    assert "--mode prefix_cache" in line
    assert outcome.stderr.count("\n") == (1 if as_json else 2)
    if as_json:
        assert json.loads(outcome.stdout)["approximate_tokens"] > 0
