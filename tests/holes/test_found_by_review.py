"""What a second hostile review found, each in its shortest form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from tests.holes.stock import stock_answer
from tests.holes.test_hole_4_state_at_store_time import with_adapters
from tests.tiny_models import random_ids, tiny_model

MakeEngine = Callable[..., KVBoost]
PROMPT = random_ids(40, seed=11)


def is_right(engine: KVBoost, prompt: list[int] = PROMPT) -> None:
    for _ in range(2):
        answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(engine.model, prompt, 4)


@pytest.mark.parametrize("rounds", range(4))
def test_packed_weights_of_an_adapted_model_and_the_one_inside(rounds: int, make_engine: MakeEngine) -> None:
    """Two watches look at the same layers: a copy is current for both or for none."""
    adapted = with_adapters(tiny_model("llama"))
    one, two = make_engine(model=adapted), make_engine(model=adapted.get_base_model())
    weight = adapted.get_base_model().lm_head.weight
    for _ in range(rounds):
        weight.data.mul_(-1.0)
        is_right(one)
    weight.data.mul_(-1.5)
    is_right(one, [*PROMPT, 7])
    weight.data.mul_(-1.5)
    is_right(two, [*PROMPT, 8])
    is_right(one, [*PROMPT, 9])


def gains_a_child(model: Any) -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.extra(super().forward(hidden))
            return result

    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Adapted
    torch.manual_seed(0)
    layer.extra = torch.nn.Linear(layer.out_features, layer.out_features)


def gains_a_buffer(model: Any) -> None:
    kind = type(model.model.layers[0].mlp.act_fn)

    class Louder(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = super().forward(hidden) * self.gain
            return result

    activation = model.model.layers[0].mlp.act_fn
    activation.__class__ = Louder
    activation.register_buffer("gain", torch.tensor(-3.0))


@pytest.mark.parametrize("gains", [gains_a_child, gains_a_buffer])
def test_a_module_that_had_nothing_and_gains_something(
    gains: Callable[[Any], None], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    is_right(engine)
    gains(engine.model)
    assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 0
    is_right(engine)
