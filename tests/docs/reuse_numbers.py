"""The tables of docs/how-reuse-works.md and of the README's part on moved text, made from result files.

`python -m tests.docs.reuse_numbers` prints them; a test compares them with the documents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GROUPS = ("alone-4", "alone-8", "behind-4", "behind-8")
SHOWN = (
    ("nothing", None),
    ("random", 0.10),
    ("selective_before", None),
    ("selective", None),
    ("deviation", 0.10),
    ("deviation", 0.20),
    ("guided", 0.05),
    ("guided", 0.10),
    ("guided", 0.15),
    ("guided", 0.20),
    ("guided", 0.30),
    ("all", None),
)
WORDS = {
    "nothing": "nothing (keys turned)",
    "random": "random tokens",
    "selective_before": "last 16 tokens before each seam",
    "selective": "first 16 tokens after each seam (`selective`)",
    "deviation": "`deviation`",
    "guided": "`guided`",
    "all": "everything",
}


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def quality_table() -> str:
    lines = [
        "| computed again | share | mean KL | alone, 4 | alone, 8 | behind, 4 | behind, 8 | same top token |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [row for row in record("quality-cuda")["results"] if row["bits"] == 16]
    results = {(row["method"], row["ratio"]): row["groups"] for row in rows}
    for key in SHOWN:
        groups = results[key]
        errors = " | ".join(f"{groups[name]['kl_mean']:.4f}" for name in GROUPS)
        overall = groups["overall"]
        lines.append(
            f"| {WORDS[key[0]]} | {overall['recomputed_share']:.1%} | {overall['kl_mean']:.4f} | {errors} "
            f"| {overall['top1']:.1%} |"
        )
    return "\n".join(lines)


def facts_table() -> str:
    facts = record("quality-cpu")["facts"]
    lines = [
        f"| of {facts['answered']} facts that full prefill finds | kept, read alone | kept, `warm_documents` "
        "| mean KL, alone | mean KL, `warm_documents` |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in facts["results"]:
        ratio = "" if row["ratio"] is None else f" {row['ratio']:.0%}"
        kept, kl = row["kept"], row["kl_mean"]
        lines.append(
            f"| {WORDS[row['method']]}{ratio} | {kept['alone']} ({row['kept_share']['alone']:.0%}) "
            f"| {kept['together']} ({row['kept_share']['together']:.0%}) | {kl['alone']:.4f} "
            f"| {kl['together']:.4f} |"
        )
    return "\n".join(lines)


def facts_line() -> str:
    facts = record("quality-cpu")["facts"]
    (row,) = [row for row in facts["results"] if (row["method"], row["ratio"]) == ("guided", 0.15)]
    return (
        f"of {facts['answered']} questions that full prefill answered, `guided` at 15% kept "
        f"{row['kept']['alone']} over documents read alone and {row['kept']['together']} over documents "
        "read by `warm_documents`"
    )


def budgets_table() -> str:
    lines = [
        "| `max_kl` | ratio chosen | KL in calibration | KL on other prompts |",
        "| --- | --- | --- | --- |",
    ]
    for row in record("quality-cuda")["budgets"]:
        if row["ratio"] is None:
            lines.append(f"| {row['max_kl']:g} | none: exact reuse only | - | - |")
        else:
            lines.append(
                f"| {row['max_kl']:g} | {row['ratio']:.0%} | {row['calibration_kl']:.4f} "
                f"| {row['held_out_kl']:.4f} |"
            )
    return "\n".join(lines)


def rag_table() -> str:
    kept = {
        f"{row['method']} {row['ratio'] or 0:.0%}": row["kept_share"]
        for row in record("quality-cpu")["facts"]["results"]
    }
    lines = [
        "| | first token | sooner | found | computed again | facts kept, read alone "
        "| facts kept, `warm_documents` |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in record("rag-cpu")["contestants"].items():
        facts = ("all", "all") if name in ("baseline", "prefix cache") else ("-", "-")
        if shares := kept.get(name):
            facts = (f"{shares['alone']:.0%}", f"{shares['together']:.0%}")
        lines.append(
            f"| {name} | {row['ttft_ms']['median']:,.0f} ms | {row['speedup']:.1f} x "
            f"| {row['cached_share']:.0%} | {row['recomputed_share']:.0%} | {' | '.join(facts)} |"
        )
    return "\n".join(lines)


def choice_table() -> str:
    """For docs/options.md: what a ratio gains and keeps."""
    speedups = {name: row["speedup"] for name, row in record("rag-cpu")["contestants"].items()}
    lines = [
        "| `recompute_ratio` | first token, 8 documents, 4,000 tokens | facts kept, read alone "
        "| facts kept, `warm_documents` |",
        "| --- | --- | --- | --- |",
    ]
    for row in record("quality-cpu")["facts"]["results"]:
        if row["method"] == "guided":
            sooner = speedups.get(f"guided {row['ratio']:.0%}")
            shares = row["kept_share"]
            lines.append(
                f"| {row['ratio']:.2f} | {'-' if sooner is None else f'{sooner:.1f} x sooner'} "
                f"| {shares['alone']:.0%} | {shares['together']:.0%} |"
            )
    return "\n".join(lines)


def wrong_guess() -> str:
    guess = record("rag-cpu")["wrong_guess"]
    return f"{guess['ratio_of_medians']:.3f} x BASELINE's ({guess['pairs']} interleaved pairs)"


def chat_table() -> str:
    lines = [
        "| turn | tokens | approximate | repaired | first token | the same chat with exact hits |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in record("rag-cpu")["chat"]:
        ours = row["approximate"]
        lines.append(
            f"| {row['turn']} | {ours['prompt_tokens']:,} | {ours['origins']['approximate']:,} "
            f"| {ours['recomputed_tokens']:,} | {ours['ttft_ms']['median']:,.0f} ms "
            f"| {row['exact']['ttft_ms']['median']:,.0f} ms |"
        )
    return "\n".join(lines)


def encoding_table() -> str:
    lines = [
        "| encoding | prefix, as it is | prefix, repaired at the seams | moved, `guided` 10% |",
        "| --- | --- | --- | --- |",
    ]
    for row in record("encoding-cpu")["results"]:
        name = ", ".join(f"`{option}={value}`" for option, value in row["encoding"].items()) or "default"
        kl = " | ".join(f"{row[use]['kl_mean']:.4f}" for use in ("prefix", "prefix_repaired", "moved"))
        lines.append(f"| {name} | {kl} |")
    return "\n".join(lines)


def machine(name: str) -> str:
    found = record(name)["machine"]
    where = found["gpu"] or f"{found['cpu']}, {found['cores']} cores"
    return f"{where}, torch {found['torch']}, transformers {found['transformers']}, {found['date'][:10]}"


PARTS = (
    quality_table,
    facts_table,
    facts_line,
    budgets_table,
    rag_table,
    wrong_guess,
    chat_table,
    encoding_table,
)

if __name__ == "__main__":
    for part in PARTS:
        print(f"--- {part.__name__}\n{part()}")  # noqa: T201
    for name in ("quality-cuda", "quality-cpu", "rag-cpu", "encoding-cpu"):
        print(machine(name))  # noqa: T201
