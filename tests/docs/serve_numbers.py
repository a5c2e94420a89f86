"""The tables of docs/performance.md on servers under load, made from the result file.

`python -m tests.docs.serve_numbers` prints them; a test compares them with the documents.
"""

from __future__ import annotations

from tests.docs.reuse_numbers import machine, record


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


def long_prompt_table(name: str = "serve-cpu", what: str = "a long prompt is read") -> str:
    found = record(name)["long_prompt"]
    lines = ["| gaps between tokens, ms | p50 | p95 | p99 |", "| --- | --- | --- | --- |"]
    for part, label in (("without", "a steady load"), ("with", f"the same while {what}")):
        gaps = found[part]["then_ms"]
        lines.append(f"| {label} | {gaps['p50']:.0f} | {gaps['p95']:,.0f} | {gaps['p99']:,.0f} |")
    return "\n".join(lines)


def rag_long_table() -> str:
    tokens = record("serve-rag-48-cpu")["long_prompt"]["long_prompt_tokens"]
    return long_prompt_table("serve-rag-48-cpu", f"{tokens:,} tokens are repaired")


def rag_table() -> str:
    lines = [
        "| answers of | running batch, tokens/s | one by one, tokens/s | | answers as one by one |",
        "| --- | --- | --- | --- | --- |",
    ]
    for tokens in (48, 128):
        servers = record(f"serve-rag-{tokens}-cpu")["servers"]
        ours, theirs = servers["kvboost"], servers["no_batching"]
        both = [each["tokens_per_s"] for each in (ours, theirs)]
        same = f"{ours['same_text_as_no_batching']} of {ours['compared']}"
        lines.append(
            f"| {tokens} tokens | {both[0]:.1f} | {both[1]:.1f} | **{both[0] / both[1]:.1f} x** | {same} |"
        )
    return "\n".join(lines)


def rag_readme_line() -> str:
    ratios = []
    for tokens in (48, 128):
        servers = record(f"serve-rag-{tokens}-cpu")["servers"]
        ratio = servers["kvboost"]["tokens_per_s"] / servers["no_batching"]["tokens_per_s"]
        ratios.append(f"{ratio:.1f} x")
    return (
        "Known documents in a new order are repaired inside the running batch: "
        f"{ratios[0]} (answers of 48 tokens) and {ratios[1]} (128) as many tokens per second as one by one."
    )


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


def soak_line() -> str:
    found = record("soak-serve")["summary"]
    refused, evicted = found["statuses"]["429"], found["evicted_chunks"]
    return (
        f"{found['minutes']:.0f} minutes of mixed load (`make soak`, "
        f"[result](../benchmarks/results/soak-serve.json)): {found['requests']:,} requests of "
        f"{found['clients']} clients, {found['clients_that_left']:,} times gone before the answer came, "
        f"floods past the queue's limit ({refused:,} answers were a 429), wrong requests, a cache that is "
        f"far too small ({evicted:,} chunks evicted). Nobody was left waiting, {found['worker']['failed']} "
        f"requests failed, all {found['answers_compared']} answers that were compared were right, and memory "
        f"grew by {found['rss_growth']:.1%} after the warm-up."
    )


def hostile_line() -> str:
    found = record("soak-hostile")
    summary, rounds = found["summary"], found["cases"]
    medians = [each["median_ms"] for each in rounds]
    worst = max(each["worst_ms"] for each in rounds)
    steps = [each["step_ms"] for each in rounds]
    looks = max(summary["longest_look_ms"].values())
    return (
        f"Ten minutes of {summary['hostile_clients']} hostile clients (huge histories and prompts, uploads "
        "that trickle, streams that nobody reads, clients that vanish, one key that floods; `make soak`, "
        "[result](../benchmarks/results/soak-hostile.json)): the first token of another key's short requests "
        f"came after {min(medians):,.0f} to {max(medians):,.0f} ms in the median of 20, {worst:,.0f} ms at "
        f"worst; alone it takes {summary['alone_ms']:.0f} ms, and one step of the batch took "
        f"{min(steps):,.0f} to {max(steps):,.0f} ms. `/health`, `/metrics` and the page answered within "
        f"{looks:,.0f} ms, and memory grew by {summary['rss_growth']:.1%} after the warm-up."
    )


def salts_line() -> str:
    found = record("proof-salts")["summary"]
    own, fresh, read = (found["median_ms"][name] for name in ("own", "fresh", "read by ann"))
    return (
        "Two keys with different salts (`make proof`, [result](../benchmarks/results/proof-salts.json)): "
        f"{found['probes_per_group']} probes each of a text that the other key had read and of one that "
        f"nobody had, {found['hits_across_salts']} hits, medians {read:.1f} and {fresh:.1f} ms; a text of "
        f"one's own takes {own:.1f} ms. The difference of {found['difference_ms']:.1f} ms is within the "
        f"noise of {found['noise_ms']:.1f} ms that two groups of fresh texts show."
    )


PARTS = (servers_table, long_prompt_table, rag_table, rag_long_table)
README_LINES = (readme_line, rag_readme_line)

if __name__ == "__main__":
    for part in (*PARTS, soak_line, hostile_line, salts_line, *README_LINES):
        print(f"--- {part.__name__}\n{part()}")  # noqa: T201
    print(machine("serve-cpu"), machine("serve-rag-128-cpu"))  # noqa: T201
