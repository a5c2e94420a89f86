"""The table of docs/disk-cache.md and the README's line on it, made from the result file.

`python -m tests.docs.disk_numbers` prints them; a test compares them with the documents.
"""

from __future__ import annotations

from tests.docs.reuse_numbers import machine, record


def disk_table() -> str:
    found = record("disk-cpu")["results"]
    size = f"{found['payload_bytes'] / 1e6:,.0f} MB"
    lines = ["| | with the disk tier | without | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {kind}, {size} | {found[f'{kind}_gb_s']:.2f} GB/s | {found[f'plain_{kind}_gb_s']:.2f} GB/s "
        f"| {found[f'{kind}_of_plain']:.2f} x |"
        for kind in ("read", "write")
    ]
    ttft, tokens = found["ttft_ms"], record("disk-cpu")["settings"]["tokens"]
    lines.append(
        f"| first token at {tokens:,} tokens | {ttft['disk']['median']:,.0f} ms "
        f"| {ttft['baseline']['median']:,.0f} ms | {found['speedup']:.1f} x sooner |"
    )
    return "\n".join(lines)


def readme_line() -> str:
    found = record("disk-cpu")
    return (
        f"a fresh process has its first token {found['results']['speedup']:.0f} x sooner than BASELINE with "
        f"{found['settings']['tokens']:,} tokens from disk"
    )


if __name__ == "__main__":
    for part in (disk_table, readme_line):
        print(f"--- {part.__name__}\n{part()}")  # noqa: T201
    print(machine("disk-cpu"))  # noqa: T201
