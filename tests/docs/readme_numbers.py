"""The README's table of numbers, made from the committed result file.

`python -m tests.docs.readme_numbers` prints it; a test compares it with the README.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RESULT = RESULTS / "prefix-cpu.json"


def table(name: str = "prefix-cpu") -> str:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    lines = [
        "| shared tokens | plain generate | reuse by hand | kvboost "
        "| against plain | against by hand | decode, against plain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["lengths"]:
        times = {name: entry["ttft_ms"]["median"] for name, entry in row["contestants"].items()}
        speed = {name: entry["decode_tokens_per_s"]["median"] for name, entry in row["contestants"].items()}
        lines.append(
            f"| {row['shared_tokens']:,} | {times['plain']:,.0f} ms | {times['hand_made']:.0f} ms "
            f"| **{times['kvboost']:.0f} ms** | {times['plain'] / times['kvboost']:.0f} x sooner "
            f"| {times['kvboost'] / times['hand_made']:.2f} x the time "
            f"| {speed['kvboost'] / speed['plain']:.2f} x the tokens/s |"
        )
    return "\n".join(lines)


def storing() -> str:
    record = json.loads(RESULT.read_text())["storing"]
    return f"{record['ratio_of_medians']:.3f} x BASELINE's ({record['pairs']} interleaved pairs)"


def machine() -> str:
    record = json.loads(RESULT.read_text())["machine"]
    return (
        f"{record['cpu']}, {record['cores']} cores, {record['threads']} threads, torch {record['torch']}, "
        f"transformers {record['transformers']}, Python {record['python']}, {record['date'][:10]}"
    )


if __name__ == "__main__":
    print(table(), storing(), machine(), sep="\n")  # noqa: T201
