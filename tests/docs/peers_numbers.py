"""The tables of docs/performance.md and the README on other engines, made from the result file.

`python -m tests.docs.peers_numbers` prints them; a test compares them with the documents.
"""

from __future__ import annotations

from benchmarks.suite.peers import KNOWN, LOCAL
from tests.docs.reuse_numbers import machine, record

NAMES = {**LOCAL, **KNOWN, "hand_made": "Hugging Face, reuse by hand", "kvboost_copied": "kvboost, copied"}


def peers_table() -> str:
    lengths = record("peers-cpu")["lengths"]
    heads = [f"{item['shared_tokens']:,}" for item in lengths]
    lines = [f"| first token, ms, by shared tokens | {' | '.join(heads)} | same tokens | KL, first token |"]
    lines.append("| --- " * (len(heads) + 3) + "|")
    for name in lengths[0]["contestants"]:
        found = [item["contestants"].get(name) for item in lengths]
        times = [f"{one['ttft_ms']['median']:,.0f}" if one else "" for one in found]
        same = sum(one["same_tokens_as_plain"] for one in found if one)
        compared = sum(one["compared_with_plain"] for one in found if one)
        worst = max((one["first_token_kl"] or 0.0 for one in found if one), default=0.0)
        label = f"**{NAMES[name]}**" if name == "kvboost" else NAMES[name].strip()
        lines.append(f"| {label} | {' | '.join(times)} | {same} of {compared} | {worst:.1g} |")
    return "\n".join(lines)


def reordered_table() -> str:
    found = record("peers-cpu")["reordered"]
    lines = ["| | first token, ms | KL, first token | same first token |", "| --- | --- | --- | --- |"]
    for name, one in found["contestants"].items():
        label = record("peers-cpu")["peers"][name]["label"]
        label = f"**{label}**" if name.startswith("guided") else label
        kl = "" if one["first_token_kl"] is None else f"{one['first_token_kl']:.2g}"
        lines.append(
            f"| {label} | {one['ttft_ms']['median']:,.0f} | {kl} "
            f"| {one['first_token_same']} of {one['first_token_prompts']} |"
        )
    return "\n".join(lines)


def profile_table() -> str:
    profiles = {item["shared_tokens"]: item["kvboost_profile"] for item in record("peers-cpu")["lengths"]}
    kinds = list(next(iter(profiles.values())))
    heads = [kind.removesuffix("_ms").replace("_", " ") for kind in kinds]
    lines = [f"| shared tokens | {' | '.join(heads)} |", "| --- " * (len(kinds) + 1) + "|"]
    for shared, profile in profiles.items():
        lines.append(f"| {shared:,} | {' | '.join(f'{profile[kind]:.0f}' for kind in kinds)} |")
    return "\n".join(lines)


def targets_list() -> str:
    lines = ["| target | measured | limit | |", "| --- | --- | --- | --- |"]
    for target in record("peers-cpu")["targets"]:
        verdict = "met" if target["met"] else "missed"
        lines.append(
            f"| {target['name']} | {target['value']:.2f} | at most {target['at_most']:g} | {verdict} |"
        )
    return "\n".join(lines)


PARTS = (peers_table, reordered_table, profile_table, targets_list)

if __name__ == "__main__":
    for part in PARTS:
        print(f"--- {part.__name__}\n{part()}")  # noqa: T201
    print(machine("peers-cpu"))  # noqa: T201
