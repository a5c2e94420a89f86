"""No causal LM that transformers can build is wrong: each is exact, or refused with a reason.

A sample of every kind runs in `make test`, the whole sweep in `make proof`; docs/models.md shows its result.
"""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch
import transformers

from kvboost.compat import TRANSFORMERS_VERSION
from tests.docs import models_numbers
from tests.equivalence.proofs import write_result
from tests.sweep.check import ERROR, EXACT, NOT_STRICT, REFUSED, WRONG, check
from tests.sweep.sweep import sweep
from tests.sweep.tiny_configs import model_types

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
# By kind: the model type, what becomes of it, and a part of the reason.
SAMPLE = [
    ("llama", EXACT, ""),
    ("gemma2", EXACT, ""),  # windows in every second layer, scores capped
    ("phimoe", EXACT, ""),  # a window by mask alone, experts
    ("doge", EXACT, ""),  # a mask that depends on the text: no rows
    ("deepseek_v3", EXACT, ""),  # latent attention, experts
    ("gpt_oss", EXACT, ""),  # attention sinks
    ("gpt2", NOT_STRICT, "learned absolute positions"),
    ("roberta", NOT_STRICT, "no rotary position embedding"),
    ("moshi", REFUSED, "while it generates"),
    ("jamba", REFUSED, "not a KV cache"),
    ("gemma3n_text", REFUSED, "shares KV between layers"),
    ("llama4_text", REFUSED, "chunked attention"),
    ("deepseek_v4", REFUSED, "failed while computing the KV"),
    ("hy_v4", REFUSED, "failed while computing the KV"),
]


@pytest.fixture
def quiet() -> collections.abc.Iterator[None]:
    """One thread, and transformers does not warn about sizes that are tiny on purpose."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.skipif(TRANSFORMERS_VERSION.major < 5, reason="older versions have other bugs of their own")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("model_type", "expected", "reason"), SAMPLE, ids=[each[0] for each in SAMPLE])
def test_a_sample_of_every_kind(model_type: str, expected: str, reason: str) -> None:
    found = check(model_type)
    assert found.outcome == expected, found
    assert reason in found.reason


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quiet")
@pytest.mark.skipif(TRANSFORMERS_VERSION.major >= 5, reason="the sample above says more")
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phimoe", "doge", "moshi", "gpt2", "qwen3_next"])
def test_older_versions_are_exact_or_refused_too(model_type: str) -> None:
    found = check(model_type)
    assert found.outcome in (EXACT, NOT_STRICT, REFUSED), found


@pytest.mark.slow
def test_no_model_type_is_wrong() -> None:
    """Every type that this transformers knows, in processes that may crash; the result is written down."""
    outcomes = sweep(model_types())
    counts = collections.Counter(outcome.outcome for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome.outcome in (WRONG, ERROR)]
    summary = {"model_types": len(outcomes), **counts, "ties": sum(outcome.ties for outcome in outcomes)}
    write_result("proof-architectures", summary, outcomes, model=None)
    assert not wrong
    assert all(outcome.reason for outcome in outcomes if outcome.outcome != EXACT)
    assert counts[EXACT] >= 90


def test_the_page_shows_the_result() -> None:
    """docs/models.md has the result file's table; `python -m tests.docs.models_numbers` writes it anew."""
    assert models_numbers.with_table(DOCUMENT.read_text()) == DOCUMENT.read_text()
