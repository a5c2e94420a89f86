"""The tables of docs/performance.md on servers under load, made from the result file.

`python -m tests.serve_numbers` prints them; a test compares them with the documents.
"""

from __future__ import annotations

from tests.reuse_numbers import machine, record


def servers_table() -> str:
    servers = record("serve-cpu")["servers"]
    ours = servers["kvboost"]["tokens_per_s"]
    lines = [
        "| | tokens/s | kvboost is at | first token, s, p50 and p99 "
        "| gap between tokens, ms, p50 and p99 | answered |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in servers.items():
        label = f"**{found['label']}**" if name == "kvboost" else found["label"].strip()
        ratio = "" if name == "kvboost" else f"{ours / found['tokens_per_s']:.1f} x"
        first, gap = found["ttft_ms"], found["gap_ms"]
        firsts = f"{first['p50'] / 1e3:.1f}, {first['p99'] / 1e3:.1f}"
        gaps = f"{gap['p50']:,.0f}, {gap['p99']:,.0f}"
        answered = f"{found['answered']} of {found['requests']}"
        lines.append(f"| {label} | {found['tokens_per_s']:.1f} | {ratio} | {firsts} | {gaps} | {answered} |")
    return "\n".join(lines)


def long_prompt_table() -> str:
    found = record("serve-cpu")["long_prompt"]
    lines = ["| gaps between tokens, ms | p50 | p95 | p99 |", "| --- | --- | --- | --- |"]
    for name, label in (("without", "a steady load"), ("with", "the same while a long prompt is read")):
        gaps = found[name]["then_ms"]
        lines.append(f"| {label} | {gaps['p50']:.0f} | {gaps['p95']:,.0f} | {gaps['p99']:,.0f} |")
    return "\n".join(lines)


def readme_line() -> str:
    servers = record("serve-cpu")["servers"]
    ours = servers["kvboost"]["tokens_per_s"]
    alone, paged, plain = (
        f"{ours / servers[name]['tokens_per_s']:.1f} x"
        for name in ("no_batching", "transformers_cb", "transformers")
    )
    return (
        f"Under load it gives {alone} as many tokens per second as one by one, {paged} and {plain} as many "
        "as `transformers serve` with and without continuous batching "
        "([measured](docs/performance.md#a-server-under-load))."
    )


PARTS = (servers_table, long_prompt_table)

if __name__ == "__main__":
    for part in (*PARTS, readme_line):
        print(f"--- {part.__name__}\n{part()}")  # noqa: T201
    print(machine("serve-cpu"))  # noqa: T201
