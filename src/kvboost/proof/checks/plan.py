"""Which parts are checked, in which order, and what a failed one means for those that stand on it.

Parts that stand on others come after them. Behind a part that failed, the parts that stand on it get no
verdict, so that the report names the cause. Knows the checks by name, none of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvboost.errors import InvalidRequestError
from kvboost.proof.checks.approximate import (
    check_moved_text,
    check_quantized,
    check_rotation,
    check_sparse_forward,
)
from kvboost.proof.checks.check import APPROXIMATE, EXACT, QUANTIZED, Check
from kvboost.proof.checks.exact import (
    check_attention,
    check_batches,
    check_bit_exact,
    check_prefill,
    check_stored,
)
from kvboost.proof.fresh_engine import Verifiable

# Name, the parts it stands on, and the check.
_PLAN: tuple[tuple[str, tuple[str, ...], Callable[[Verifiable, Any], list[Check]]], ...] = (
    ("attention", (), check_attention),
    ("prefill", ("attention",), check_prefill),
    ("stored KV", ("attention", "prefill", "layers", "positions"), check_stored),
    ("bit-exact", (), check_bit_exact),
    ("batches", ("attention", "prefill", "layers", "positions"), check_batches),
    ("quantized", ("attention", "prefill", "layers", "positions"), check_quantized),
    ("rotation", (), check_rotation),
    ("sparse pass", ("attention",), check_sparse_forward),
    ("moved text", ("attention", "rotation", "sparse pass"), check_moved_text),
)
_KINDS = {
    "attention": EXACT,
    "positions": EXACT,
    "layers": EXACT,
    "prefill": EXACT,
    "stored KV": EXACT,
    "bit-exact": EXACT,
    "batches": EXACT,
    "quantized": QUANTIZED,
    "rotation": APPROXIMATE,
    "sparse pass": APPROXIMATE,
    "moved text": APPROXIMATE,
}


def run_checks(
    engine: Verifiable, asked: Sequence[Sequence[int]], tell: Callable[[str], None] = lambda _what: None
) -> Iterator[Check]:
    """Check all parts; `asked` are prompts of which the engine has stored something."""
    done: dict[str, Check] = {}
    for name, needs, run in _PLAN:
        tell(name)
        blamed = [each for each in needs if each in done and done[each].passed is False]
        if blamed:
            found = [Check(name, _KINDS[name], None, f"not judged, since {blamed[0]} is wrong")]
        else:
            found = _run(name, run, engine, asked)
        for check in found:
            if done.get(check.name) is None or done[check.name].passed is not False:
                done[check.name] = check
    yield from (done[name] for name in _KINDS if name in done)


def _run(
    name: str,
    run: Callable[[Verifiable, Any], list[Check]],
    engine: Verifiable,
    asked: Sequence[Sequence[int]],
) -> list[Check]:
    """What `run` finds. A part that raises is wrong, unless memory is short or the request is refused."""
    try:
        return run(engine, asked)
    except (InvalidRequestError, MemoryError, torch.OutOfMemoryError) as error:
        return [Check(name, _KINDS[name], None, f"not judged: {_told(error)}")]
    except Exception as error:  # of the model, its cache or our kernels: the report names the part
        return [Check(name, _KINDS[name], False, f"raised {_told(error)}")]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
