"""The demo's outcome as tables and plain words. Knows what was measured, no engine."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvboost.cli.demo import DemoReport


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
    table = Table()
    table.add_column("question", overflow="fold")
    for heading in ("first token\ncold", "first token\nwarm", "times\nsooner", "tokens reused\nof prompt"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same\nanswer")
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
    table = Table()
    table.add_column("turn", justify="right")
    table.add_column("message", overflow="fold")
    for heading in ("prompt tokens", "reused", "first token"):
        table.add_column(heading, justify="right", no_wrap=True)
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
    lines = []
    for question, answer in pairs:
        lines.append(Text(f"- {question} ").append(" ".join(answer.split()), style="italic"))
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
