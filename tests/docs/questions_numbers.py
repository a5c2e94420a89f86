"""The table of docs/your-questions.md, made from the result file of the sample questions.

`python -m tests.docs.questions_numbers` writes it into the page; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path

from tests.docs.made_parts import with_part
from tests.docs.reuse_numbers import machine, record

PAGE = Path(__file__).parents[2] / "docs" / "your-questions.md"
COMMAND = "kvboost evaluate examples/questions.jsonl --max-new-tokens 16 --again --out benchmarks/results"


def rows_table() -> str:
    lines = [
        "| | right | of BASELINE's right kept | first token, median | speed-up | reused | computed again |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in record("questions-cpu")["rows"]:
        name = row["mode"] if row["ratio"] is None else f"{row['mode']}, {row['ratio']:.0%}"
        lines.append(
            f"| {name} | {row['right']} of {row['questions']} | {row['kept']} of {row['baseline_right']} "
            f"| {row['ttft_ms']:,.0f} ms | {row['speedup']:.1f} x | {row['reused_share']:.0%} "
            f"| {row['recomputed_share']:.0%} |"
        )
    return "\n".join(lines)


def made() -> str:
    found = record("questions-cpu")
    limit = f" --limit {found['limit']}" if found["limit"] else ""
    return (
        f"{rows_table()}\n\n> {found['recommendation']}\n\n"
        f"{found['questions']} questions over {found['documents']} documents, read {found['read']}, "
        f"{found['model']} in {found['dtype']}, {machine('questions-cpu')}, "
        f"load average {found['machine']['load_average']:.1f}. Command: `{COMMAND}{limit}`; all answers: "
        "[result](../benchmarks/results/questions-cpu.json)."
    )


def with_numbers(page: str) -> str:
    return with_part(page, "questions_numbers", made())


if __name__ == "__main__":
    PAGE.write_text(with_numbers(PAGE.read_text()))
