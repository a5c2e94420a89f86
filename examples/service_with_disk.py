"""A long-lived service: what it has read is still there after a restart, from disk."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvboost import GenerationResult, KVBoost

HANDBOOK = (
    "Handbook of the water works. Pumps are checked on Mondays and Thursdays. A valve that sticks is greased "
    "and never forced. The red lamp means low pressure, the white lamp that the reserve tank is open. Leaks "
    "are reported to the desk in the yard, with the number of the street and the nearest hydrant. "
) * 3


def open_engine(folder: str) -> KVBoost:
    """An engine whose cache is kept in `folder`, under hard limits in RAM and on disk."""
    return KVBoost.from_pretrained(
        "builtin", max_cache_bytes=200_000_000, disk_cache_dir=folder, disk_cache_bytes=500_000_000
    )


def main(folder: str = "kv-cache", opened: Callable[[str], KVBoost] = open_engine) -> list[GenerationResult]:
    """Two lives of one service: the first reads the handbook, the second finds it."""
    results = []
    for question in ("What does the red lamp mean?", "When are pumps checked?"):
        with opened(folder) as engine:  # closing waits until all is saved
            result = engine.generate(f"{HANDBOOK}\nQuestion: {question}\nAnswer:", max_new_tokens=8)
            print(f"{question}{result.output_text!r}")
            print(f"  {result.cached_tokens} of {result.prompt_tokens} tokens from the cache")
        results.append(result)
    return results


if __name__ == "__main__":
    main(*sys.argv[1:2])
