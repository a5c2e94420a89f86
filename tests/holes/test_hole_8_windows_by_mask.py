"""Hole 8: a sliding window that a model applies through its mask alone.

Batches and scattered passes knew windows only by an argument that not every model passes, so batches, scores
and approximate reuse saw too much. Windows are learned from the masks that the model makes, or the path is
not taken.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvboost.compat import TRANSFORMERS_VERSION
from kvboost.errors import UnsupportedModelError
from kvboost.kernels.windows import windows_of
from kvboost.kv.layout import probe_layout
from kvboost.kv.rope import WINDOW_REASON, approximate_limit_tokens, learn_rotation
from kvboost.proof.selftest import check_exactness
from tests.fixture_types import MakeEngine
from tests.sweep.tiny_configs import WINDOW, build
from tests.tiny_models import random_ids, tiny_model

LENGTHS = (33, 36, 39, 41, 45, 70, 100, 190)
IS_4 = TRANSFORMERS_VERSION.major < 5
pytestmark = pytest.mark.filterwarnings("ignore:.*is not among the tested architectures")
from_5_on = pytest.mark.skipif(IS_4, reason="transformers 4's own generate differs from its own forward here")


def _prompts() -> list[list[int]]:
    return [random_ids(30, 1) + random_ids(length - 30, length) for length in LENGTHS]


@from_5_on
@pytest.mark.parametrize("model_type", ["phimoe", "doge", "qwen2_moe"])
def test_batches_and_scores_see_what_the_mask_shows(make_engine: MakeEngine, model_type: str) -> None:
    engine = make_engine(model=build(model_type))
    prompts = _prompts()
    expected = [engine.generate(each, max_new_tokens=8, mode="baseline").token_ids for each in prompts]
    for _ in ("cold", "warm"):
        results = engine.generate_batch(prompts, max_new_tokens=8)
        assert [result.token_ids for result in results] == expected
    continuations = [random_ids(4, 100 + number) for number in range(len(prompts))]
    for _ in ("cold", "warm"):
        scores = engine.score(prompts, continuations)
        for prompt, continuation, score in zip(prompts, continuations, scores, strict=True):
            values = _plain_scores(engine.model, prompt, continuation)
            assert score.token_log_likelihoods == pytest.approx(values, abs=1e-3)


def _plain_scores(model: Any, prompt: list[int], continuation: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([(prompt + continuation)[:-1]])).logits[0, len(prompt) - 1 :]
    values: list[float] = (
        logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None])[:, 0].tolist()
    )
    return values


@pytest.mark.skipif(not IS_4, reason="they are exact from transformers 5 on")
@pytest.mark.parametrize("model_type", ["phimoe", "doge", "qwen2_moe", "moshi"])
def test_transformers_4_is_refused_with_the_measured_difference(
    make_engine: MakeEngine, model_type: str
) -> None:
    with pytest.raises(UnsupportedModelError, match="does not give the same logits from"):
        make_engine(model=build(model_type))


@from_5_on
def test_a_window_by_mask_runs_in_rows(make_engine: MakeEngine) -> None:
    """PhiMoE's mask is an ordinary window, so nothing is lost; Doge's depends on the data."""
    engine = make_engine(model=build("phimoe"))
    assert not engine.why_not_packed
    assert windows_of(engine.model).layers == (WINDOW,) * 4
    assert make_engine(model=build("doge")).why_not_packed


@from_5_on
def test_a_model_whose_cache_drops_what_its_masks_show_is_refused(make_engine: MakeEngine) -> None:
    """Moshi: its own generate forgets what lies before the window, its own forward does not."""
    with pytest.raises(UnsupportedModelError, match="drops all but the last 40 tokens of layer 0"):
        make_engine(model=build("moshi"))


@from_5_on
def test_approximate_reuse_goes_by_the_masks(make_engine: MakeEngine) -> None:
    model = build("phimoe")
    assert approximate_limit_tokens(model) == WINDOW
    engine = make_engine(model=model)
    first, second = random_ids(48, 1), random_ids(48, 2)
    engine.warm(first + second)
    result = engine.generate(second + first, max_new_tokens=4)
    assert result.token_ids == engine.generate(second + first, max_new_tokens=4, mode="baseline").token_ids
    assert engine.explain(second + first).choice == WINDOW_REASON


def test_a_name_that_is_not_in_force_is_no_window() -> None:
    """Of Qwen2's layers, those before `max_window_layers` see everything."""
    assert windows_of(tiny_model("qwen2_sliding")).layers == (None, WINDOW, WINDOW)
    assert windows_of(tiny_model("gemma3")).layers == (WINDOW, None, WINDOW)
    assert windows_of(tiny_model("llama")).layers == (None, None, None)


@from_5_on
def test_a_mask_that_adds_something_takes_neither_path() -> None:
    """Doge weighs the tokens that it sees."""
    model = build("doge")
    learned = windows_of(model)
    assert "adds a bias" in learned.refusal
    assert learned.layers == (WINDOW,) * 4
    reason = learn_rotation(model, probe_layout(model))
    assert isinstance(reason, str)
    assert "adds a bias" in reason


@from_5_on
def test_what_the_text_decides_is_refused_however_late_it_begins(make_engine: MakeEngine) -> None:
    """Doge that leaves out tokens behind the first 500 of them: no short text can show it."""
    model = build("doge", keep_window_size=500, sliding_window=None)
    assert windows_of(model).layers == ()
    with pytest.raises(
        UnsupportedModelError, match="the mask of layer 0 is neither causal nor a sliding window"
    ):
        make_engine(model=model)


@pytest.mark.timed
@from_5_on
def test_large_windows_are_learned_at_the_price_of_a_step() -> None:
    model = build("phimoe", sliding_window=4096, max_position_embeddings=131_072)
    started = time.perf_counter()
    assert windows_of(model).layers == (4096,) * 4
    assert approximate_limit_tokens(model) == 4096
    assert time.perf_counter() - started < 5.0
    longer = build("phimoe", sliding_window=4096, max_position_embeddings=4000)
    assert windows_of(longer).layers == (None,) * 4, "a window longer than the range never matters"


def test_a_window_that_is_changed_is_learned_again(make_engine: MakeEngine) -> None:
    model = tiny_model("mistral")
    make_engine(model=model)
    assert windows_of(model).layers == (WINDOW,) * 3
    model.config.sliding_window = 50
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "sliding_window"):
            layer.self_attn.sliding_window = 50
    make_engine(model=model)
    assert windows_of(model).layers == (50,) * 3


@from_5_on
def test_the_self_test_outgrows_small_windows() -> None:
    """What goes wrong behind the window only is seen at load."""
    model = build("phimoe")
    layout = probe_layout(model)
    check_exactness(model, layout)
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() > WINDOW and kwargs["attention_mask"] is not None:
            kwargs["attention_mask"] = None
        return own(*args, **kwargs)

    attention.forward = forgetful
    with pytest.raises(UnsupportedModelError, match="does not give the same logits"):
        check_exactness(model, layout)
