"""The table of docs/models.md, made from the committed result of the sweep over model types.

`python -m tests.docs.models_numbers` writes it into the page; a test compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "proof-architectures.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- made by tests/docs/models_numbers.py -->", "<!-- end of what is made -->"
EXACT, NOT_STRICT, REFUSED, UNBUILDABLE = "exact", "exact with strict=False", "refused", "cannot be built"
# What follows a reason is of no use on this page.
_ADVICE = "; pass strict=False to try it with exact reuse only"


def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text())
    return found


def summary() -> str:
    record = result()
    counts, versions = record["summary"], record["versions"]
    num_wrong = counts.get("wrong", 0) + counts.get("raw error", 0)
    return (
        f"Of {counts['model_types']} model types, {counts.get(EXACT, 0)} are exact, "
        f"{counts.get(NOT_STRICT, 0)} more with `strict=False`, {counts.get(REFUSED, 0)} are refused with a "
        f"reason, {counts.get(UNBUILDABLE, 0)} could not be tried, and {num_wrong or 'none'} is wrong "
        f"(transformers {versions['transformers']}, torch {versions['torch']}, {record['date']})."
    )


def tables() -> Iterator[str]:
    cases = result()["cases"]
    exact = [case for case in cases if case["outcome"] == EXACT]
    in_rows, alone = ([case for case in exact if case["rows"] is rows] for rows in (True, False))
    yield "### Exact"
    yield "Alone, with a shared prefix, in batches that run in one forward, and in `score`:"
    yield _names(in_rows)
    if alone:
        yield "Exact too, but prompts of a batch run one by one:"
        yield _names(alone)
    for outcome, title, intro in (
        (NOT_STRICT, "Exact with strict=False", "Their keys cannot be moved, so reuse is exact or none."),
        (REFUSED, "Refused", "With `strict=False` as well."),
        (UNBUILDABLE, "Not tried", "What came of building a tiny one and running it on token ids."),
    ):
        found = [case for case in cases if case["outcome"] == outcome]
        if found:
            yield f"### {title}"
            yield intro
            yield _table(found)


def _names(cases: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{case['model_type']}`" for case in cases) + "."


def _table(cases: list[dict[str, Any]]) -> str:
    rows: dict[str, list[str]] = {}
    for case in cases:
        reason = case["reason"].removesuffix(_ADVICE).removeprefix(case["model_class"]).strip()
        rows.setdefault(reason.replace("|", "\\|").replace("<", "&lt;"), []).append(f"`{case['model_type']}`")
    lines = ["| model types | why |", "| --- | --- |"]
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in rows.items()]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with what is made between its two marks."""
    made = "\n\n".join([BEGIN, summary(), *tables(), END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: made, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
