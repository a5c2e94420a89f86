"""The numbers of a GPU in docs/performance.md and the README's line on them, from the result files.

`python -m tests.docs.gpu_numbers` writes them; a test compares them with the pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs import readme_numbers
from tests.docs.batch_numbers import workload
from tests.docs.made_parts import with_part
from tests.docs.reuse_numbers import machine, record

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
RESULTS = "../benchmarks/results"
RAG = ("rag-8000-cuda", "rag-32000-cuda", "rag-host-8000-cuda", "rag-host-32000-cuda")
HOMES = {"model": "the GPU", "cpu": "host memory"}


def decode_line() -> str:
    found = []
    for row in record("prefix-cuda")["lengths"]:
        speed = {name: each["decode_tokens_per_s"]["median"] for name, each in row["contestants"].items()}
        share = speed["plain"] / speed["kvboost"]
        found.append(f"{1000 / speed['kvboost']:.1f} ms behind {row['shared_tokens']:,} ({share:.2f} x)")
    return f"A further token takes {' and '.join(found)} of plain generate's time."


def homes_table() -> str:
    rows = record("homes-cuda")["lengths"]
    lines = [
        "| KV lies in | bits | " + " | ".join(f"{row['cached_tokens']:,} tokens" for row in rows) + " |",
        "| --- | --- | " + " | ".join("---" for _ in rows) + " |",
    ]
    for name in rows[0]["homes"]:
        home, bits = name.split()
        cells = " | ".join(f"{row['homes'][name]['ttft_ms']['median']:.0f} ms" for row in rows)
        lines.append(f"| {'the GPU' if home == 'device' else 'pinned host memory'} | {bits} | {cells} |")
    copies = " | ".join(f"{row['bare_copy_ms']['median']:.0f} ms" for row in rows)
    return "\n".join([*lines, f"| one bare copy from there | 16 | {copies} |"])


def rag_table() -> str:
    lines = [
        "| KV lies in | tokens | baseline | exact reuse only | guided 10% | guided 15% | deviation 10% | "
        "deviation 15% |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in RAG:
        found = record(name)
        rows = found["contestants"]
        base = f"{rows['baseline']['ttft_ms']['median']:,.0f} ms"
        cells = [
            f"{rows[key]['speedup']:.2f} x" if key in rows else ""
            for key in ("prefix cache", "guided 10%", "guided 15%", "deviation 10%", "deviation 15%")
        ]
        tokens = found["settings"]["prompt_tokens"]
        lines.append(f"| {HOMES[found['cache_device']]} | {tokens:,} | {base} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mixtures_table() -> str:
    lines = [
        "| tokens | documents | known | reused | baseline | kvboost | x |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in record("mixtures-cuda")["rows"]:
        base, ours = (row[name]["median"] for name in ("baseline_ttft_ms", "ttft_ms"))
        reused = f"{row['cached_share']:.0%}" if row["reused"] else "no"
        lines.append(
            f"| {row['tokens']:,} | {row['documents']} | {row['known']:.0%} | {reused} "
            f"| {base:,.0f} ms | {ours:,.0f} ms | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def batch_line() -> str:
    found = record("batch-cuda")
    speed, ratios = found["results"]["batch"]["tokens_per_s"], found["ratios"]
    return (
        f"{workload('batch-cuda')}: {speed:,.0f} tokens/s, {ratios['throughput_over_continuous']:.1f} x "
        "transformers' continuous batching and "
        f"{ratios['throughput_over_hugging_face']:.1f} x its padded batch."
    )


def targets_table() -> str:
    lines = ["| target | measured | limit | |", "| --- | --- | --- | --- |"]
    for name in (*RAG, "homes-cuda", "mixtures-cuda", "batch-cuda"):
        lines += [_target_row(name, target) for target in record(name)["targets"]]
    return "\n".join(lines)


def _target_row(name: str, target: dict[str, Any]) -> str:
    is_most = "at_most" in target
    limit = f"at most {target['at_most']:g}" if is_most else f"at least {target['at_least']:g}"
    verdict = "met" if target["met"] else "missed"
    return f"| {name}: {target['name']} | {target['value']:g} | {limit} | {verdict} |"


def made() -> str:
    found = record("prefix-cuda")
    links = ", ".join(f"[{name}]({RESULTS}/{name}.json)" for name in ("prefix-cuda", *RAG, "homes-cuda"))
    more = ", ".join(f"[{name}]({RESULTS}/{name}.json)" for name in ("mixtures-cuda", "batch-cuda"))
    known = "known documents in a new order"
    return "\n\n".join(
        [
            f"{machine('prefix-cuda')}; a random model of the shape of an 8B one ({found['model']}) in "
            f"{found['dtype']}. "
            "Medians, wall time from the call to the first token.",
            "A long shared beginning whose KV is on the GPU, 20 new tokens:",
            readme_numbers.table("prefix-cuda"),
            decode_line(),
            "The same by where KV lies and by its bits, all of it placed for the request (nothing lies in "
            "the engine's own batch):",
            homes_table(),
            f"First token with {known}, against baseline; tokens of all documents:",
            rag_table(),
            "Does the cost guard ever lose? Prompts of which more or less is known, against baseline:",
            mixtures_table(),
            f"Together: {batch_line()}",
            "What was to be reached:",
            targets_table(),
            f"All numbers: {links}, {more}. Commands: `kvboost bench prefix --lengths 8192,32768 "
            "--plain-rounds 2 --pairs 3`, `bench homes`, `bench rag --prompt-tokens 8000 | 32000` (from the "
            "host with `--cache-device cpu --gpu-cache-bytes 0`), `bench mixtures`, `bench batch --batch 64 "
            "--prefixes 4 --prefix-tokens 2048 --shortest-tail 20 --longest-tail 40 --new-tokens 64`, each "
            "with `--model random:8b --dtype bfloat16` and, where nothing else is said, `--cache-device "
            "model`.",
        ]
    )


def readme_line() -> str:
    rows = {name: record(name)["contestants"] for name in RAG[:2]}
    prefix = record("prefix-cuda")["lengths"][-1]
    first = prefix["contestants"]["kvboost"]["ttft_ms"]["median"]
    speedups = [rows[name]["guided 10%"]["speedup"] for name in RAG[:2]]
    batch = record("batch-cuda")["ratios"]["throughput_over_continuous"]
    return (
        f"With an 8B shape on an NVIDIA H200, a first token behind {prefix['shared_tokens']:,} cached tokens "
        f"takes {first:.0f} ms, known documents in a new order answer {speedups[0]:.1f} x sooner (8,000 "
        f"tokens) and {speedups[1]:.1f} x sooner (32,000), and 64 prompts over shared text run at "
        f"{batch:.0f} x the speed of transformers' continuous batching "
        "([numbers](docs/performance.md#on-a-gpu))"
    )


def with_numbers(page: str) -> str:
    return with_part(page, "gpu_numbers", made())


if __name__ == "__main__":
    PAGE.write_text(with_numbers(PAGE.read_text()))
    print(readme_line())  # noqa: T201
