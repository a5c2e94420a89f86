"""Random models by name: for timing."""

from __future__ import annotations

import pytest
import torch

from kvboost import KVBoost
from kvboost.errors import InvalidRequestError


def test_the_same_weights_every_time() -> None:
    state = torch.get_rng_state()
    with KVBoost.from_pretrained("random:tiny", device="cpu") as first:
        with KVBoost.from_pretrained("random:tiny", device="cpu") as second:
            pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        assert torch.equal(torch.get_rng_state(), state)
        assert first.tokenize("héllo") == first.tokenizer("héllo")["input_ids"]
        text = "some words " * 10
        first.warm(text)
        result = first.generate(text + "and more", 4, mode="prefix_cache")
        assert result.cached_tokens == len(text)
        assert result.token_ids == first.generate(text + "and more", 4, mode="baseline").token_ids
        assert first.generate([{"role": "user", "content": "x"}], 2).generated_tokens == 2


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "auto"])
def test_types(dtype: object) -> None:
    with KVBoost.from_pretrained("random:tiny", dtype=dtype, device="cpu") as engine:
        assert engine.model.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32


def test_bad_names_and_options() -> None:
    with pytest.raises(InvalidRequestError, match="there are random:tiny, random:1b, random:8b"):
        KVBoost.from_pretrained("random:900b")
    with pytest.raises(InvalidRequestError, match="takes no option revision"):
        KVBoost.from_pretrained("random:tiny", revision="main")
