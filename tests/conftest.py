"""Fixtures shared by all tests. The real model is loaded once per run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from kvboost import ApproximateReuseWarning, KVBoost
from kvboost.errors import BuiltinModelMissingError
from kvboost.executor.reuse_notice import ReuseNotice
from kvboost.loading.embedded import ensure_checkpoint
from tests.fixture_types import MakeEngine
from tests.reuse_warnings import approximate_reuse_expected
from tests.threads import one_torch_thread
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A tiny model and its tokenizer in a folder, for commands that load one by name."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_folder(saved_model: Path) -> Iterator[str]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models lose more by waiting for a second core than they gain
    yield str(saved_model)
    torch.set_num_threads(num_threads)


@pytest.fixture
def approximate_reuse() -> Iterator[list[ApproximateReuseWarning]]:
    """For tests in which engines may reuse text approximately; yields what they say of it, once each."""
    with approximate_reuse_expected() as caught:
        yield caught


@pytest.fixture
def make_engine(tokenizer: Any) -> Iterator[MakeEngine]:
    """Engines on tiny models; the integrity of every store is checked at the end."""
    engines: list[KVBoost] = []

    def make(architecture: str = "llama", *, model: Any = None, **options: Any) -> KVBoost:
        dtype = options.pop("dtype", torch.float32)
        options.setdefault("chunk_size", 16)
        options.setdefault("max_chunks", None)
        engine = KVBoost(model or tiny_model(architecture, dtype=dtype), tokenizer, **options)
        engines.append(engine)
        return engine

    with one_torch_thread():
        yield make
    for engine in engines:
        engine.cache_manager.check_integrity()
        engine.close()


@pytest.fixture(scope="session")
def real_engine() -> Iterator[KVBoost]:
    """The built-in model in float32, with room for everything that the tests store."""
    try:
        ensure_checkpoint()
    except BuiltinModelMissingError as error:
        pytest.fail(str(error))
    with KVBoost.from_pretrained("builtin", max_chunks=None, max_cache_bytes=6_000_000_000) as engine:
        yield engine
        engine.cache_manager.check_integrity()


@pytest.fixture
def real(real_engine: KVBoost) -> Iterator[KVBoost]:
    """The real engine with an empty cache, for a test that leaves the model as it was."""
    real_engine.clear()
    real_engine.core.notice = ReuseNotice(overlap=False)  # it may warn again
    yield real_engine
    real_engine.cache_manager.check_integrity()
    assert not real_engine.weights_changed()
