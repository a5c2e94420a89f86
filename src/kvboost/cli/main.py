"""Entry point of the `kvboost` command: the group, and how errors and Ctrl-C look.

Knows the commands by name only; what they do is in modules of their own.
"""

from __future__ import annotations

from typing import Any

import click

from kvboost import __version__
from kvboost.cli.bench import bench
from kvboost.cli.calibrate import calibrate
from kvboost.cli.demo import demo
from kvboost.cli.disk import disk, stats
from kvboost.cli.evaluate import evaluate
from kvboost.cli.explain import explain
from kvboost.cli.generate import generate
from kvboost.cli.remote import remote
from kvboost.cli.serve import serve
from kvboost.cli.verify import verify
from kvboost.cli.warm import warm
from kvboost.errors import KVBoostError

INTERRUPTED = 130


class KVBoostGroup(click.Group):
    """Shows expected errors as one line, and the trace only with --debug."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            raise  # click ends quietly when the reader of a pipe is gone
        except (KVBoostError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            click.secho(f"error: {in_one_line(error)}", fg="red", err=True)
            ctx.exit(1)


def in_one_line(error: BaseException) -> str:
    """The message without line breaks; the error's kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@click.group(cls=KVBoostGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvboost")
@click.option("--debug", is_flag=True, help="Show the stack trace of an error.")
def main(debug: bool) -> None:  # debug is read from the context, where errors are shown
    """Reuse what a Hugging Face model has already read.

    \b
    kvboost demo                                  see it work, on a built-in model
    kvboost generate builtin "Why is the sky blue?" --chat
    kvboost warm builtin handbook.txt --cache DIR  read texts once, keep them
    kvboost serve builtin                         answer any OpenAI client, with a page at /
    kvboost stats --cache DIR                     see what is kept
    kvboost explain builtin PROMPT --cache DIR    what would be reused, and why not the rest
    kvboost disk check DIR                        check over what --disk-cache-dir keeps
    kvboost remote stats redis://HOST             see what machines share behind --remote-cache
    kvboost verify builtin                        prove that what is reused is right
    kvboost calibrate builtin                     measure the error of approximate reuse
    kvboost evaluate questions.jsonl              your own questions: which mode and ratio to use
    kvboost bench prefix                          measure it on this machine

    MODEL is a hub name, a folder, or "builtin".
    """


for command in (
    demo,
    generate,
    warm,
    serve,
    explain,
    stats,
    calibrate,
    evaluate,
    verify,
    disk,
    remote,
    bench,
):
    main.add_command(command)
