"""The numbers of docs/batches.md, docs/evaluation.md and the README's line on them, from the result files.

`python -m tests.docs.batch_numbers` prints them; a test compares them with the documents.
"""

from __future__ import annotations

from benchmarks.suite.commands.batch import NAMES
from tests.docs.reuse_numbers import machine, record


def batch_table(name: str = "batch-cpu") -> str:
    found = record(name)
    lines = ["| | prompts/s | against Hugging Face | same answers |", "| --- | --- | --- | --- |"]
    base = found["results"]["hugging_face"]["prompts_per_s"]
    for key, row in found["results"].items():
        label = NAMES[key].strip()
        label = f"**{label}**" if key == "batch" else label
        lines.append(
            f"| {label} | {row['prompts_per_s']:.2f} | {row['prompts_per_s'] / base:.1f} x "
            f"| {row['same_answers']} of {row['answers']} |"
        )
    return "\n".join(lines)


def workload(name: str = "batch-cpu") -> str:
    settings = record(name)["settings"]
    several, shared = settings.get("prefixes", 1), f"{settings['prefix_tokens']:,}"
    if several > 1:
        shared = f"{several} beginnings of {shared}"
    return (
        f"{settings['batch']} prompts with {shared} shared tokens and tails of "
        f"{settings['shortest_tail']} to {settings['longest_tail']}, {settings['new_tokens']} new tokens each"
    )


def memory_line(name: str = "batch-cpu") -> str:
    found = record(name)
    memory = found["memory"]
    return (
        f"The KV of {memory['rows']} sequences over {found['settings']['prefix_tokens']:,} shared tokens "
        f"takes {memory['kv_bytes'] / 1e6:,.0f} MB; with the prefix copied for every sequence it would take "
        f"{memory['kv_bytes_expanded'] / 1e6:,.0f} MB ({memory['ratio']:.2f} x)."
    )


def proof_line() -> str:
    found = record("proof-batch")["summary"]
    return (
        f"{found['same_tokens']} of {found['prompts']} prompts with {found['shared_tokens']:,} shared tokens "
        f"gave BASELINE's {found['new_tokens']} tokens"
    )


def evaluation_table() -> str:
    contestants = record("evaluation-cpu")["results"]["contestants"]
    ours = contestants["kvboost"]["seconds"]["median"]
    lines = ["| | seconds | against kvboost |", "| --- | --- | --- |"]
    for key, row in contestants.items():
        seconds = row["seconds"]["median"]
        lines.append(f"| {key} | {seconds:.1f} | {seconds / ours:.1f} x |")
    return "\n".join(lines)


def evaluation_line() -> str:
    found = record("evaluation-cpu")
    settings, results = found["settings"], found["results"]
    version, largest = found["versions"]["lm_eval"], results["largest_difference"]
    return (
        f"{settings['questions']} questions of four choices each, {settings['shots']} examples before every "
        f"question, lm_eval {version}; the {results['requests']} log-likelihoods differ by at most "
        f"{largest:.0e}"
    )


def readme_line() -> str:
    ratios = record("batch-cpu")["ratios"]
    batches, singly = ratios["throughput_over_hugging_face"], ratios["throughput_over_one_by_one"]
    return (
        f"`generate_many` answers {batches:.0f} x as many prompts per second as Hugging Face's own padded "
        f"batches, and {singly:.1f} x as many as one by one"
    )


PARTS = (batch_table, workload, memory_line, proof_line)

if __name__ == "__main__":
    for part in (*PARTS, evaluation_table, evaluation_line, readme_line):
        print(f"--- {part.__name__}\n{part()}")  # noqa: T201
    print(machine("batch-cpu"))  # noqa: T201
