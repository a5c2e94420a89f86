"""`kvboost disk`, `kvboost stats --disk` and the flags --disk-cache-dir and --disk-cache-bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvboost.cli.main import main
from kvboost.disk.folder import DESCRIPTION, seal
from kvboost.disk.tier import INDEX, SLOTS, DiskTier
from tests.cli.command import kvboost

TEXT = "The lamp is lit thirty minutes before sunset."  # the tiny tokenizer has a token per byte
SLOT_BYTES = 16_384  # of 16 tokens
DAMAGED = 3


def generate(model: str, folder: Path, prompt: str = TEXT, *more: str) -> dict[str, Any]:
    outcome = kvboost(
        *("generate", model, prompt, "--disk-cache-dir", folder, "--chunk-size", "16"),
        *("--max-new-tokens", "4", "--json", *more),
    )
    assert outcome.exit_code == 0, outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def check(folder: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    outcome = kvboost("disk", "check", folder, "--json", *more)
    return outcome.exit_code, json.loads(outcome.stdout)


def stats(folder: Path) -> list[dict[str, Any]]:
    outcome = kvboost("stats", "--disk", folder, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    found: list[dict[str, Any]] = json.loads(outcome.stdout)
    return found


def damage(folder: Path, *chunks: int) -> list[str]:
    """Change a byte of the given chunks; returns their keys."""
    with DiskTier.existing(folder) as tier:
        entries = sorted(tier.entries(), key=lambda entry: int(entry.header.meta["position_start"]))
    with (folder / SLOTS).open("r+b") as file:
        for number in chunks:
            file.seek(entries[number].slot * SLOT_BYTES + 6000)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    return [entries[number].header.key for number in chunks]


def is_one_line(text: str) -> bool:
    return text.count("\n") == 1 and "Traceback" not in text


@pytest.fixture
def disk(tmp_path: Path, tiny_folder: str) -> Path:
    """A disk cache with the text and its answer: 48 tokens, so 3 chunks."""
    folder = tmp_path / "disk"
    generate(tiny_folder, folder)
    return folder


@pytest.fixture
def tier_folder(disk: Path) -> Path:
    (found,) = (path for path in disk.iterdir() if path.is_dir())
    return found


# --- generate ----------------------------------------------------------------------------------


def test_a_second_run_reads_what_the_first_one_kept(tiny_folder: str, tmp_path: Path) -> None:
    first = generate(tiny_folder, tmp_path / "disk")
    second = generate(tiny_folder, tmp_path / "disk")
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, len(TEXT) - 1)
    assert first["token_ids"] == second["token_ids"]
    longer = generate(tiny_folder, tmp_path / "disk", TEXT + " Why?")
    assert longer["cached_tokens"] == len(TEXT)
    baseline = generate(tiny_folder, tmp_path / "disk", TEXT + " Why?", "--mode", "baseline")
    assert baseline["cached_tokens"] == 0
    assert longer["token_ids"] == baseline["token_ids"]


def test_another_encoding_has_a_folder_of_its_own(tiny_folder: str, disk: Path) -> None:
    for more in (("--kv-cache-bits", "8"), ("--dtype", "bfloat16"), ("--overlap-k", "4")):
        assert generate(tiny_folder, disk, TEXT, *more)["cached_tokens"] == 0
    assert generate(tiny_folder, disk)["cached_tokens"] == len(TEXT) - 1
    found = stats(disk)
    assert len(found) == 4
    assert sorted(str(one["kv_cache_bits"]) for one in found) == ["16", "16", "16", "8"]


def test_the_byte_budget_holds(tiny_folder: str, tmp_path: Path) -> None:
    budget = 2 * SLOT_BYTES + 100
    for text in (TEXT, TEXT[::-1], TEXT.upper()):
        generate(tiny_folder, tmp_path / "disk", text, "--disk-cache-bytes", str(budget))
    (one,) = stats(tmp_path / "disk")
    assert (one["max_chunks"], one["allocated_bytes"]) == (2, 2 * SLOT_BYTES)
    assert one["chunks"] <= 2
    assert sum(path.stat().st_size for path in (tmp_path / "disk").rglob(SLOTS)) <= budget


@pytest.mark.parametrize("budget", ["0", "-5", "much"])
def test_a_bad_budget_is_refused(budget: str, tmp_path: Path) -> None:
    outcome = kvboost(
        *("generate", "no/such/model", "x", "--disk-cache-dir", tmp_path / "d", "--disk-cache-bytes", budget)
    )
    assert outcome.exit_code == 2
    assert "at least 1" in outcome.stderr
    assert not (tmp_path / "d").exists()


def test_a_budget_without_a_folder_is_refused_before_loading() -> None:
    outcome = kvboost("generate", "no/such/model", "x", "--disk-cache-bytes", "100000")
    assert outcome.exit_code != 0
    assert "disk_cache_dir" in outcome.stderr or "--disk-cache-dir" in outcome.stderr
    assert is_one_line(outcome.stderr) or outcome.exit_code == 2


def test_a_folder_that_is_a_file_is_refused(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = kvboost("generate", tiny_folder, TEXT, "--disk-cache-dir", tmp_path / "file")
    assert outcome.exit_code in (1, 2)
    assert "file" in outcome.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_below_a_file_is_refused_in_a_line(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = kvboost("generate", tiny_folder, TEXT, "--disk-cache-dir", tmp_path / "file" / "disk")
    assert outcome.exit_code == 1
    assert is_one_line(outcome.stderr)


def test_folders_are_private(disk: Path, tier_folder: Path) -> None:
    assert disk.stat().st_mode & 0o777 == 0o700
    assert tier_folder.stat().st_mode & 0o777 == 0o700
    for path in tier_folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_damaged_chunk_is_computed_again(tiny_folder: str, disk: Path, tier_folder: Path) -> None:
    good = generate(tiny_folder, disk)
    damage(tier_folder, 1)
    again = generate(tiny_folder, disk)
    assert again["token_ids"] == good["token_ids"]
    assert again["cached_tokens"] == 16
    assert check(disk)[0] == 0  # it was written anew


def test_warm_and_serve_know_the_flags() -> None:
    for command in ("generate", "warm", "explain"):
        text = kvboost(command, "--help").stdout
        assert "--disk-cache-dir" in text, command
        assert "--disk-cache-bytes" in text, command


# --- stats ---------------------------------------------------------------------------------------


def test_stats_in_numbers(disk: Path, tier_folder: Path, tiny_folder: str) -> None:
    (one,) = stats(disk)
    assert one["folder"] == str(tier_folder)
    assert one["model"] == tiny_folder
    assert (one["chunks"], one["max_chunks"], one["tokens"]) == (3, 256, len(TEXT) + 3)
    assert one["kv_cache_bits"] == 16
    assert one["allocated_bytes"] == 8 * SLOT_BYTES == (tier_folder / SLOTS).stat().st_size
    assert one["read_only"] is False
    assert 0 < one["bytes"] <= 3 * SLOT_BYTES
    assert stats(tier_folder) == [one]  # the folder below is understood too


def test_stats_as_a_table(disk: Path, tiny_folder: str) -> None:
    outcome = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["stats", "--disk", str(disk)])
    assert outcome.exit_code == 0, outcome.stderr
    for heading in ("model", "bits", "chunks", "tokens", "used", "set aside"):
        assert heading in outcome.stdout
    assert "256" in outcome.stdout
    assert str(len(TEXT) + 3) in outcome.stdout
    assert tiny_folder in outcome.stdout


def test_models_of_one_folder_are_told_apart(tmp_path: Path) -> None:
    """In 80 columns too, and whatever stands in their names."""
    labels = ["/srv/models/company/department/team/" + "long-" * 5 + end for end in ("one", "two")]
    labels += ["models/[/odd]", "models/[red]name"]
    for number, label in enumerate(labels):
        DiskTier(tmp_path / str(number), 2, 4096, label=label).close()
    outcome = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["stats", "--disk", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    for end in ("one", "two", "[/odd]", "[red]name"):
        assert end in outcome.stdout
    assert [one["model"] for one in stats(tmp_path)] == labels


def test_stats_change_nothing(disk: Path, tier_folder: Path) -> None:
    before = (tier_folder / SLOTS).read_bytes(), (tier_folder / DESCRIPTION).read_bytes()
    assert stats(disk) == stats(disk)
    assert ((tier_folder / SLOTS).read_bytes(), (tier_folder / DESCRIPTION).read_bytes()) == before


def test_stats_need_one_folder(disk: Path) -> None:
    for arguments in ((), ("--disk", disk, "--cache", disk)):
        outcome = kvboost("stats", *arguments)
        assert outcome.exit_code == 2
        assert "--cache or --disk" in outcome.stderr


# --- check ---------------------------------------------------------------------------------------


def test_a_good_folder(disk: Path, tier_folder: Path) -> None:
    status, (one,) = check(disk)
    assert status == 0
    assert one == {
        "folder": str(tier_folder),
        "slots": 256,
        "good": 3,
        "corrupt": [],
        "writing": 0,
        "free": 253,
        "problems": [],
        "repaired": False,
    }
    assert check(tier_folder) == (0, [one])
    outcome = kvboost("disk", "check", disk)
    assert outcome.exit_code == 0
    assert "253" in outcome.stdout


@pytest.mark.parametrize("chunks", [(0,), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_damage_is_found_and_repaired(
    chunks: tuple[int, ...], disk: Path, tier_folder: Path, tiny_folder: str
) -> None:
    keys = damage(tier_folder, *chunks)
    for _ in range(2):  # looking repairs nothing
        status, (one,) = check(disk)
        assert status == DAMAGED
        assert sorted(one["corrupt"]) == sorted(keys)
        assert (one["good"], one["free"], one["repaired"]) == (3 - len(chunks), 253, False)
    status, (one,) = check(disk, "--repair")
    assert (status, one["repaired"]) == (DAMAGED, True)
    assert sorted(one["corrupt"]) == sorted(keys)
    status, (one,) = check(disk, "--repair")
    assert (status, one["corrupt"], one["good"], one["repaired"]) == (0, [], 3 - len(chunks), False)
    assert one["free"] == 253 + len(chunks)
    assert generate(tiny_folder, disk)["cached_tokens"] == 16 * min(chunks)
    assert check(disk)[0] == 0


def test_damage_as_a_table(disk: Path, tier_folder: Path) -> None:
    damage(tier_folder, 1)
    outcome = kvboost("disk", "check", disk)
    assert outcome.exit_code == DAMAGED
    assert "damaged" in outcome.stdout
    assert "(dropped)" not in outcome.stdout
    assert "(dropped)" in kvboost("disk", "check", "--repair", disk).stdout


def test_one_damaged_folder_of_two(disk: Path, tier_folder: Path, tiny_folder: str) -> None:
    generate(tiny_folder, disk, TEXT, "--kv-cache-bits", "8")
    damage(tier_folder, 0)
    status, found = check(disk)
    assert status == DAMAGED
    assert sorted(len(one["corrupt"]) for one in found) == [0, 1]


@pytest.mark.parametrize("size", [0, 100, SLOT_BYTES + 5])
def test_a_truncated_slot_file(size: int, disk: Path, tier_folder: Path) -> None:
    os.truncate(tier_folder / SLOTS, size)
    status, (one,) = check(disk, "--repair")
    assert status == DAMAGED
    assert one["good"] + len(one["corrupt"]) == 3
    status, (one,) = check(disk)
    assert (status, one["good"] + one["free"]) == (0, 256)


def test_a_missing_slot_file(disk: Path, tier_folder: Path, tiny_folder: str) -> None:
    (tier_folder / SLOTS).unlink()
    status, (one,) = check(disk, "--repair")
    assert (status, one["good"], len(one["corrupt"])) == (DAMAGED, 0, 3)
    assert generate(tiny_folder, disk)["cached_tokens"] == 0
    assert generate(tiny_folder, disk)["cached_tokens"] == len(TEXT) - 1


def test_a_missing_index_is_made_from_the_slots(disk: Path, tier_folder: Path, tiny_folder: str) -> None:
    for path in tier_folder.glob(f"{INDEX}*"):
        path.unlink()
    status, (one,) = check(disk)
    assert (status, one["good"]) == (0, 3)
    assert generate(tiny_folder, disk)["cached_tokens"] == len(TEXT) - 1


def test_a_damaged_index_is_said_and_made_anew(disk: Path, tier_folder: Path, tiny_folder: str) -> None:
    """In a process of its own: there, a warning is a warning."""
    (tier_folder / INDEX).write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("kvboost")), "disk", "check", str(disk), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "damaged" in done.stderr
    (one,) = json.loads(done.stdout)
    assert one["good"] == 3
    assert done.returncode == 0
    assert generate(tiny_folder, disk)["cached_tokens"] == len(TEXT) - 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x"}'], ids=repr)
@pytest.mark.parametrize("command", [("disk", "check"), ("disk", "clear", "--yes"), ("stats", "--disk")])
def test_a_damaged_description_is_one_line(
    command: tuple[str, ...], text: str, disk: Path, tier_folder: Path
) -> None:
    (tier_folder / DESCRIPTION).write_text(text)
    outcome = kvboost(*command, disk)
    assert outcome.exit_code == 1
    assert is_one_line(outcome.stderr), outcome.stderr
    assert str(tier_folder) in outcome.stderr


def test_another_version_is_refused(disk: Path, tier_folder: Path) -> None:
    found = {**json.loads((tier_folder / DESCRIPTION).read_text()), "version": 99}
    sealed = {**found, "check": seal(found)}
    (tier_folder / DESCRIPTION).write_text(json.dumps(sealed))
    before = (tier_folder / SLOTS).read_bytes()
    for command in (("disk", "check"), ("disk", "clear", "--yes"), ("stats", "--disk")):
        outcome = kvboost(*command, disk)
        assert outcome.exit_code == 1
        assert "version 99" in outcome.stderr
        assert is_one_line(outcome.stderr)
    assert (tier_folder / SLOTS).read_bytes() == before


@pytest.mark.parametrize("command", [("disk", "check"), ("disk", "clear", "--yes"), ("stats", "--disk")])
def test_a_folder_without_a_cache(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    outcome = kvboost(*command, tmp_path)
    assert outcome.exit_code == 1
    assert "holds no disk cache" in outcome.stderr
    assert is_one_line(outcome.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    outcome = kvboost(*command, tmp_path / "nowhere")
    assert outcome.exit_code in (1, 2)
    assert "nowhere" in outcome.stderr
    assert not (tmp_path / "nowhere").exists()


# --- clear ---------------------------------------------------------------------------------------


def test_clear_forgets_all_models(disk: Path, tier_folder: Path, tiny_folder: str) -> None:
    generate(tiny_folder, disk, TEXT, "--kv-cache-bits", "8")
    outcome = kvboost("disk", "clear", disk, "--yes")
    assert (outcome.exit_code, outcome.stdout) == (0, "6 chunks forgotten\n")
    assert [one["chunks"] for one in stats(disk)] == [0, 0]
    assert not any((tier_folder / SLOTS).read_bytes())
    assert check(disk)[0] == 0
    assert generate(tiny_folder, disk)["cached_tokens"] == 0
    assert generate(tiny_folder, disk)["cached_tokens"] == len(TEXT) - 1


def test_clear_asks_first(disk: Path) -> None:
    for answer in ("n\n", "\n", ""):
        outcome = kvboost("disk", "clear", disk, answer=answer)
        assert outcome.exit_code == 1
        assert "Traceback" not in outcome.output
        assert stats(disk)[0]["chunks"] == 3
    outcome = kvboost("disk", "clear", disk, answer="y\n")
    assert outcome.exit_code == 0
    assert "3 chunks forgotten" in outcome.stdout
    assert stats(disk)[0]["chunks"] == 0


def test_clear_takes_other_peoples_files_not_along(disk: Path, tier_folder: Path) -> None:
    (disk / "notes.txt").write_text("mine")
    (tier_folder / "notes.txt").write_text("mine too")
    assert kvboost("disk", "clear", disk, "--yes").exit_code == 0
    assert (disk / "notes.txt").read_text() == "mine"
    assert (tier_folder / "notes.txt").read_text() == "mine too"


def test_commands_beside_a_running_engine(disk: Path, tiny_folder: str) -> None:
    from kvboost import KVBoost

    with KVBoost.from_pretrained(tiny_folder, chunk_size=16, disk_cache_dir=disk, device="cpu") as engine:
        expected = engine.generate(TEXT, max_new_tokens=4, mode="baseline").token_ids
        assert check(disk)[0] == 0
        assert stats(disk)[0]["chunks"] == 3
        assert kvboost("disk", "clear", disk, "--yes").exit_code == 0
        result = engine.generate(TEXT, max_new_tokens=4)
        assert result.token_ids == expected
        assert result.cached_tokens == 0
    assert stats(disk)[0]["chunks"] == 3
    assert check(disk)[0] == 0


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom kvboost.cli.main import main\n"
        "for arguments in (['disk', '--help'], ['disk', 'check', '--help'], ['disk', 'clear', '--help']):\n"
        "    assert CliRunner().invoke(main, arguments).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
