"""The tables on the shared store, made from the result files.

`python -m tests.docs.remote_numbers` prints them; a test compares them with docs/remote.md and the README.
"""

from __future__ import annotations

from tests.docs.reuse_numbers import machine, record

STORES = ("remote-redis-cpu", "remote-s3-cpu")


def answers_table() -> str:
    lines = [
        "| store | tokens | BASELINE | out of RAM | out of the store | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in STORES:
        found = record(name)
        for row in found["lengths"]:
            times = [f"{row['ttft_ms'][who]['median']:,.0f} ms" for who in ("baseline", "ram", "remote")]
            cells = [
                found["settings"]["server"],
                f"{row['tokens']:,}",
                *times,
                f"{row['speedup']:.1f} x sooner",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reading_table() -> str:
    lines = [
        "| store | read | with checks, into the cache | bare pipelined GET | | round trips of a look-up |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in STORES:
        found = record(name)
        row = found["lengths"][-1]
        cells = [
            found["settings"]["server"],
            f"{row['bytes'] / 1e6:,.0f} MB",
            f"{row['read_gb_s']:.2f} GB/s",
            f"{row['bare_gb_s']:.2f} GB/s",
            f"{row['read_of_bare']:.2f} x",
            str(row["lookup_trips"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for part in (answers_table, reading_table):
        print(f"--- {part.__name__}\n{part()}")  # noqa: T201
    print(*(machine(name) for name in STORES), sep="\n")  # noqa: T201
