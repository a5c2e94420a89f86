"""A short run at load: does this model give the same answer from a cache in parts?

What fails here would give wrong tokens later, so the model is refused with the measured error.
"""

from __future__ import annotations

from typing import Any

import torch

from kvboost.arena import Arena, KVLayout
from kvboost.compat import probing, text_config
from kvboost.errors import UnsupportedModelError

_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def check_exactness(model: Any, layout: KVLayout) -> None:
    """Compare logits of one forward with those of three forwards over an arena."""
    device = model.get_input_embeddings().weight.device
    vocab = text_config(model).vocab_size
    ids = (torch.arange(_TOKENS) * 7919 % vocab).to(device).unsqueeze(0)
    with probing(model, "checking that a cache in parts gives the same logits"):
        whole = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        arena = Arena(layout, _TOKENS)
        for start, end in ((0, 9), (9, 20), (20, _TOKENS)):
            parts = model(input_ids=ids[:, start:end], past_key_values=arena, use_cache=True)
        difference = (parts.logits[0, -1].float() - whole).norm() / whole.norm().clamp_min(1e-6)
    tolerance = _TOLERANCE.get(layout.slabs[0].dtype, 1e-1)
    if not float(difference) <= tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not give the same logits from a cache in parts: the relative "
            f"difference is {float(difference):.2g}, at most {tolerance:.0e} was expected"
        )
