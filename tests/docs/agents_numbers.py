"""The table of docs/recipes/agents.md, made from the result file of `bench agents`.

`python -m tests.docs.agents_numbers` writes it into the page; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path

from tests.docs.made_parts import with_part
from tests.docs.reuse_numbers import machine, record

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "agents.md"
WORDS = {"thinking": "thinking is stripped", "tools": "the tool list changes", "summary": "a summary comes"}


def changes_table() -> str:
    lines = [
        "| first turn after | tokens | moved, reused | first token | exact reuse only | BASELINE | mean KL "
        "| facts kept |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, case in record("agents-cpu")["cases"].items():
        (turn,) = [turn for turn in case["turns"] if turn["moved_tokens"] and turn["turn"] == 7]
        times = {way: f"{found['median']:,.0f} ms" for way, found in turn["ttft_ms"].items()}
        facts = case["facts"]
        lines.append(
            f"| {WORDS[name]} | {turn['prompt_tokens']:,} "
            f"| {turn['moved_reused']:.0%} of {turn['moved_tokens']:,} | {times['reuse']} "
            f"| {times['exact_only']} | {times['baseline']} | {turn['kl']:.4f} "
            f"| {facts['kept']} of {facts['full_prefill']} |"
        )
    return "\n".join(lines)


def later_line() -> str:
    found = record("agents-cpu")
    targets = {target["name"]: target["value"] for target in found["targets"]}
    later = [targets[f"{name}: slowest later turn / exact only"] for name in WORDS]
    twice = max(case["repaired_twice"] for case in found["cases"].values())
    return (
        f"The slowest of the later turns takes {', '.join(f'{each:.3f}' for each in later)} x as long as "
        f"with exact reuse only; {twice} tokens are repaired twice."
    )


def made() -> str:
    found = record("agents-cpu")
    return (
        f"{changes_table()}\n\n{later_line()} {found['recompute_ratio']:.0%} of the moved tokens are "
        "computed again; facts are those of earlier tool results that full prefill finds, asked for with the "
        "first words of the answer given. "
        f"{found['settings']['rounds']} chats per case, medians, built-in model in {found['dtype']}, "
        f"{machine('agents-cpu')}. Command: `kvboost bench agents`; all numbers: "
        "[agents-cpu.json](../../benchmarks/results/agents-cpu.json)."
    )


def with_numbers(page: str) -> str:
    return with_part(page, "agents_numbers", made())


if __name__ == "__main__":
    PAGE.write_text(with_numbers(PAGE.read_text()))
