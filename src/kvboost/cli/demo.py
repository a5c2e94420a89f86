"""`kvboost demo`: the same questions with and without reuse, then a chat.

Shown as tables and plain words. Knows the engine's public calls only.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from kvboost.cli.bench_view import numbers
from kvboost.cli.demo_text import CHAT, QUESTIONS, system_message
from kvboost.cli.options import GroupedCommand, engine_options, model_option
from kvboost.cli.session import opened_engine

if TYPE_CHECKING:
    from kvboost.engine import InferenceEngine

MAX_NEW_TOKENS = 28
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """One question, asked without the cache (cold) and with it (warm)."""

    question: str
    answer: str
    cold_ttft_ms: float
    warm_ttft_ms: float
    speedup: float
    prompt_tokens: int
    reused_tokens: int
    same_answer: bool


@dataclass(frozen=True)
class Turn:
    """One turn of the chat."""

    turn: int
    question: str
    answer: str
    prompt_tokens: int
    reused_tokens: int
    ttft_ms: float


@dataclass(frozen=True)
class DemoReport:
    """Everything that the demo measured; `read_once` is the one reading that fills the cache."""

    model: str
    read_once_tokens: int
    read_once_ms: float
    questions: tuple[Comparison, ...]
    chat: tuple[Turn, ...]
    cache_bytes: int


@click.command(cls=GroupedCommand)
@model_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@engine_options
def demo(model: str, as_json: bool, engine_options: dict[str, Any]) -> None:
    """See reuse at work: a long document, three questions, and a chat.

    Takes well under a minute on two CPU cores; the very first run converts the built-in model,
    which takes about 20 seconds more.

    \b
    kvboost demo
    kvboost demo --json
    """
    if as_json:
        with opened_engine(model, engine_options) as engine:
            report = run(engine, model, lambda _text: None)
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
        return
    console = Console(highlight=False)
    with opened_engine(model, engine_options, console) as engine, console.status("reading") as status:
        report = run(engine, model, status.update)
    show(report, console)


def run(engine: InferenceEngine, model: str, tell: Tell) -> DemoReport:
    """Measure it all; `tell` hears what is being done."""
    tell("reading the handbook once")
    started = time.perf_counter()
    warmed = engine.warm([system_message()])
    read_once_ms = (time.perf_counter() - started) * 1e3
    return DemoReport(
        model=model,
        read_once_tokens=warmed.token_count,
        read_once_ms=round(read_once_ms, 1),
        questions=tuple(_compare(engine, number, tell) for number in range(len(QUESTIONS))),
        chat=_chat(engine, tell),
        cache_bytes=int(engine.cache_stats()["bytes"]),
    )


def _compare(engine: InferenceEngine, number: int, tell: Tell) -> Comparison:
    question = QUESTIONS[number]
    messages = [system_message(), {"role": "user", "content": question}]
    tell(f"question {number + 1} of {len(QUESTIONS)}, without the cache")
    cold = engine.generate(messages, MAX_NEW_TOKENS, mode="baseline")
    tell(f"question {number + 1} of {len(QUESTIONS)}, with the cache")
    warm = engine.generate(messages, MAX_NEW_TOKENS, mode="prefix_cache")
    return Comparison(
        question=question,
        answer=warm.output_text.strip(),
        cold_ttft_ms=round(cold.ttft_ms, 1),
        warm_ttft_ms=round(warm.ttft_ms, 1),
        speedup=round(cold.ttft_ms / warm.ttft_ms, 1),
        prompt_tokens=warm.prompt_tokens,
        reused_tokens=warm.cached_tokens,
        same_answer=cold.token_ids == warm.token_ids,
    )


def _chat(engine: InferenceEngine, tell: Tell) -> tuple[Turn, ...]:
    messages = [system_message()]
    turns = []
    for number, question in enumerate(CHAT, start=1):
        tell(f"chat, turn {number} of {len(CHAT)}")
        messages.append({"role": "user", "content": question})
        result = engine.generate(messages, MAX_NEW_TOKENS, mode="prefix_cache")
        messages.append({"role": "assistant", "content": result.output_text})
        turns.append(
            Turn(
                turn=number,
                question=question,
                answer=result.output_text.strip(),
                prompt_tokens=result.prompt_tokens,
                reused_tokens=result.cached_tokens,
                ttft_ms=round(result.ttft_ms, 1),
            )
        )
    return tuple(turns)


# --- in tables and words ---------------------------------------------------------------------------


def show(report: DemoReport, console: Console) -> None:
    """Print both tables and what they mean."""
    console.print(
        f"\n[bold]A long document, three questions[/bold]  ({report.read_once_tokens:,} tokens; "
        f"model: {escape(report.model)})"
    )
    console.print(questions_table(report))
    console.print(answers([(item.question, item.answer) for item in report.questions]))
    console.print("\n[bold]A chat of four turns over the same document[/bold]")
    console.print(chat_table(report))
    console.print(answers([(turn.question, turn.answer) for turn in report.chat]))
    console.print("\n[bold]What happened[/bold]")
    for paragraph in explanation(report):
        console.print(paragraph + "\n", markup=False)


def questions_table(report: DemoReport) -> Table:
    """Cold and warm side by side."""
    counted = numbers("first token\ncold", "first token\nwarm", "times\nsooner", "tokens reused\nof prompt")
    table = Table(Column("question", overflow="fold"), *counted, "same\nanswer")
    for item in report.questions:
        table.add_row(
            item.question,
            seconds(item.cold_ttft_ms),
            seconds(item.warm_ttft_ms),
            f"{item.speedup:.1f} x",
            f"{item.reused_tokens:,} / {item.prompt_tokens:,}",
            "[green]yes[/green]" if item.same_answer else "[red]no[/red]",
        )
    return table


def chat_table(report: DemoReport) -> Table:
    """The prompt grows, the wait does not."""
    counted = numbers("prompt tokens", "reused", "first token")
    table = Table(Column("turn", justify="right"), Column("message", overflow="fold"), *counted)
    for turn in report.chat:
        table.add_row(
            str(turn.turn),
            turn.question,
            f"{turn.prompt_tokens:,}",
            f"{turn.reused_tokens:,}",
            seconds(turn.ttft_ms),
        )
    return table


def answers(pairs: list[tuple[str, str]]) -> Text:
    """What was asked, and what the model said."""
    lines = (Text(f"- {asked} ").append(" ".join(answer.split()), style="italic") for asked, answer in pairs)
    return Text("\n").join(lines)


def explanation(report: DemoReport) -> list[str]:
    """The numbers in plain words, a paragraph each."""
    cold = median(item.cold_ttft_ms for item in report.questions)
    warm = median(item.warm_ttft_ms for item in report.questions)
    new = [item.prompt_tokens - item.reused_tokens for item in report.questions]
    first, last = report.chat[0], report.chat[-1]
    times = [turn.ttft_ms for turn in report.chat]
    return [
        f"Before a model can answer, it has to read the whole prompt. Without a cache it read about "
        f"{report.questions[0].prompt_tokens:,} tokens again for every question, and the first token came "
        f"after {seconds(cold)}.",
        f"kvboost read the part that all questions share once, in {seconds(report.read_once_ms)}, and kept "
        f"what the model had worked out about it (its keys and values, {report.cache_bytes / 1e6:.0f} MB by "
        f"the end). For each question only {span(new)} tokens were new, and the first token came after "
        f"{seconds(warm)}: {cold / warm:.1f} times sooner.",
        _sameness(report),
        f"In the chat every turn begins with all the turns before it, the answers included, and those are "
        f"in the cache as well. So the prompt grew from {first.prompt_tokens:,} to {last.prompt_tokens:,} "
        f"tokens while the first token kept coming after {seconds(min(times))} to {seconds(max(times))}.",
    ]


def _sameness(report: DemoReport) -> str:
    same = sum(item.same_answer for item in report.questions)
    if same == len(report.questions):
        return (
            "The answers are the same, token for token: what is reused is what the model would have "
            "computed again, because the text before it is exactly the same. (Same does not mean right: "
            "a small model is as often wrong with a cache as without.)"
        )
    return (
        f"{same} of {len(report.questions)} answers are the same, token for token. What is reused is what "
        "the model would have computed again, but in low-precision arithmetic the order of additions can "
        "tip a close choice; --bit-exact rules that out."
    )


def seconds(milliseconds: float) -> str:
    """A duration with a fitting unit."""
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1_000 else f"{milliseconds:.0f} ms"


def span(values: list[int]) -> str:
    """One number, or the lowest and the highest."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
