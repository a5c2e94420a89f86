"""`kvboost bench`: benchmarks as commands; a table for people, one line of JSON for programs.

Four are installed. All others are in the repository and join the group where kvboost runs from a checkout.
Knows the commands by name only.
"""

from __future__ import annotations

import click

from kvboost.cli.bench_compare import compare
from kvboost.cli.bench_prefix import prefix
from kvboost.cli.bench_rag import rag
from kvboost.cli.bench_serve import serve
from kvboost.cli.checkout import checkout_commands

ELSEWHERE = "All other benchmarks are only in a checkout of the repository."


class BenchGroup(click.Group):
    """The installed benchmarks, and those of the checkout if there is one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(checkout_commands() or ())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or (checkout_commands() or {}).get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if checkout_commands() is None and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. {ELSEWHERE}")
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if checkout_commands() is None:
            formatter.write_paragraph()
            formatter.write_text(ELSEWHERE)


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure on this machine. Every benchmark ends with one line of JSON."""


for command in (prefix, rag, serve, compare):
    bench.add_command(command)
