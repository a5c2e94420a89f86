"""`kvboost demo`: the same questions with and without reuse, then a chat.

Measures here, shows in `demo_report`. Knows the engine's public calls only.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvboost.cli.demo_text import CHAT, QUESTIONS, system_message
from kvboost.cli.options import GroupedCommand, engine_options
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
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
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
    from kvboost.cli.demo_report import show

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
