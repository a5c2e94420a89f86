"""What the model itself would answer, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def stock_answer(model: Any, token_ids: Sequence[int], max_new_tokens: int = 6, **options: Any) -> list[int]:
    """The greedy answer of the model's own generate to `token_ids`."""
    ids = torch.tensor([list(token_ids)], device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **options,
        )
    found = output if isinstance(output, torch.Tensor) else output.sequences
    answer: list[int] = found[0, len(token_ids) :].tolist()
    return answer
