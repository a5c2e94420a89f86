"""The tables of docs/quantization.md and the README's line on it, made from result files.

`python -m tests.docs.quant_numbers` prints them; a test compares them with the documents.
"""

from __future__ import annotations

from tests.docs.reuse_numbers import machine, record

WORDS = {"16": "16 (as computed)", "8": "`8`", "k8v4": '`"k8v4"`', "4": "`4`"}


def widths_table() -> str:
    found = record("quant-cpu")
    lines = [
        "| `kv_cache_bits` | bytes of float16 | mean KL | same top token | first token at "
        f"{found['settings']['ttft_tokens']:,} tokens | store | load |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for bits in ("8", "k8v4", "4"):
        width, error = found["widths"][bits], found["errors"][bits]
        lines.append(
            f"| {WORDS[bits]} | {width['bytes_of_float16']:.3f} x | {error['kl_mean']:.5f} "
            f"| {error['agreement']:.1%} | {width['ttft_ratio']:.2f} x | {width['store_gb_s']:.1f} GB/s "
            f"| {width['load_gb_s']:.1f} GB/s |"
        )
    return "\n".join(lines)


def ways_table() -> str:
    lines = ["| how | mean KL (95% interval) | median | same top token |", "| --- | --- | --- | --- |"]
    for name, error in record("quant-cpu")["errors"].items():
        lines.append(
            f"| {name} | {error['kl_mean']:.5f} ({error['kl_mean_low']:.5f} to {error['kl_mean_high']:.5f}) "
            f"| {error['kl_median']:.5f} | {error['agreement']:.1%} |"
        )
    return "\n".join(lines)


def plain_speed() -> str:
    plain = record("quant-cpu")["widths"]["16"]
    return (
        f"Unquantized: {plain['ttft_ms']['median']:.0f} ms to the first token, store "
        f"{plain['store_gb_s']:.1f} GB/s, load {plain['load_gb_s']:.1f} GB/s."
    )


def moved_table() -> str:
    lines = [
        "| cached KV | mean KL | alone, 4 | alone, 8 | behind, 4 | behind, 8 | same top token |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [
        row for row in record("quality-cuda")["results"] if (row["method"], row["ratio"]) == ("guided", 0.1)
    ]
    for row in rows:
        groups = row["groups"]
        errors = " | ".join(
            f"{groups[name]['kl_mean']:.4f}" for name in ("alone-4", "alone-8", "behind-4", "behind-8")
        )
        overall = groups["overall"]
        lines.append(
            f"| {WORDS[str(row['bits'])]} | {overall['kl_mean']:.4f} | {errors} | {overall['top1']:.1%} |"
        )
    return "\n".join(lines)


def readme_line() -> str:
    found = record("quant-cpu")
    eight, four = (found["widths"][bits] for bits in ("8", "4"))
    kl = {bits: found["errors"][bits]["kl_mean"] for bits in ("8", "4")}
    return (
        f"`kv_cache_bits=8` keeps {1 / eight['bytes_of_float16']:.1f} times as much text as float16 in the "
        f"same bytes at a mean KL of {kl['8']:.5f} from unquantized reuse, `4` keeps "
        f"{1 / four['bytes_of_float16']:.1f} times as much at {kl['4']:.4f}; the first token then "
        f"comes after {eight['ttft_ratio']:.2f} x and {four['ttft_ratio']:.2f} x the time"
    )


PARTS = (widths_table, plain_speed, ways_table, moved_table)

if __name__ == "__main__":
    for part in (*PARTS, readme_line):
        print(f"--- {part.__name__}\n{part()}")  # noqa: T201
    print(machine("quant-cpu"))  # noqa: T201
