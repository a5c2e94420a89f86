"""`kvboost bench agents`: chats of agents in which text moves.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvboost.cli.bench_view import (
    bar,
    json_line,
    opened,
    out_option,
    prepare,
    read_names,
    show,
    simple_table,
    title,
)
from kvboost.cli.options import GroupedCommand, engine_options, model_option, setting

CASES = ("thinking", "tools", "summary")
HEADINGS = {
    "thinking": "thinking before the user's last message is stripped",
    "tools": "a tool joins or leaves the system prompt",
    "summary": "a summary replaces half of the history",
}


@click.command(cls=GroupedCommand)
@setting(
    "--cases",
    ",".join(CASES),
    "What changes in mid-chat.",
    str,
    callback=functools.partial(read_names, CASES),
)
@setting("--rounds", 3, "Chats per case, with other texts each.")
@setting("--moved-tokens", 3_200, "Of tool results that move at the change, about.")
@setting("--thought-words", 60, "Of a thought, and of a tool result after the change.")
@setting("--answer-tokens", 12, "Over which answers are compared.")
@setting("--baseline-rounds", 1, "In which BASELINE serves every turn.", click.IntRange(min=0))
@setting("--seed", 0, "Of texts and questions.", int)
@model_option
@out_option
@json_line
@engine_options
def agents(
    model: str, out: Path | None, as_json: bool, engine_options: dict[str, Any], **options: Any
) -> None:
    """Agents' chats of twelve turns in which text moves: first tokens, reused text, facts.

    In the seventh turn the template strips thinking, the tool list changes, or a summary replaces half
    of the history. Exact reuse has to compute again all that stands behind; approximate reuse moves
    it. The turns after it show what was settled then. About a quarter of an hour with the default
    settings on two slow cores.

    \b
    kvboost bench agents --out results
    kvboost bench agents --cases tools --rounds 1 --moved-tokens 1000
    """
    from benchmarks.suite.agents import AgentSettings, run

    settings = AgentSettings(**options)
    prepare(out)
    with (
        opened(model, engine_options, ("recompute_strategy", "max_kl")) as (engine, open_engine),
        bar() as report,
    ):
        record = run(engine, model, settings, open_engine, report)
    tables = [agents_table(record, case) for case in record["cases"]]
    show(record, [] if as_json else [title(record), *tables, facts_table(record)], out)


def agents_table(record: dict[str, Any], case: str) -> Table:
    """A row per turn of one case."""
    headings = ("tokens", "exact", "approx-\nimate", "re-\npaired", "moved,\nreused", "KL")
    times = ("first token,\nms", "exact\nonly", "BASE-\nLINE")
    table = simple_table("turn", *headings, *times, "sooner", above=HEADINGS[case])
    for row in record["cases"][case]["turns"]:
        origins, ttft = row["origins"], row["ttft_ms"]
        table.add_row(
            str(row["turn"]),
            f"{row['prompt_tokens']:,}",
            f"{origins['exact']:,}",
            f"{origins['approximate']:,}",
            f"{origins['recomputed']:,}",
            "" if row["moved_reused"] is None else f"{row['moved_tokens']:,}, {row['moved_reused']:.1%}",
            "" if row["kl"] is None else f"{row['kl']:.4f}",
            f"{ttft['reuse']['median']:,.0f}",
            f"{ttft['exact_only']['median']:,.0f}",
            f"{ttft['baseline']['median']:,.0f}" if ttft["baseline"] else "",
            f"{row['sooner']:.2f} x",
        )
    return table


def facts_table(record: dict[str, Any]) -> Table:
    """A row per case: facts of earlier tool results, asked for at the change and later."""
    table = simple_table(
        "facts of earlier turns", "asked", "full\nprefill", "reuse", "kept of\nfull prefill's"
    )
    for case, found in record["cases"].items():
        for when, facts in (("at the change", found["facts"]), ("later", found["later_facts"])):
            table.add_row(
                f"{case}, {when}",
                str(facts["asked"]),
                str(facts["full_prefill"]),
                str(facts["reuse"]),
                "-" if facts["kept_share"] is None else f"{facts['kept']} ({facts['kept_share']:.0%})",
            )
    return table
