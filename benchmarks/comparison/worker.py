"""One side of a comparison: imports the kvboost that is on its path, and measures when it is told to.

A process per side, so that a model is loaded once. Speaks in lines of JSON: says which kvboost it has, then
answers every line on stdin with a record. Whatever the benchmark prints goes elsewhere. Relies only on what
every revision has: the command `kvboost bench`, and `from_pretrained`, `tokenize`, `warm`, `generate` and
`generate_batch`. The command finds the benchmarks of its own checkout, whether they are part of the package
or in `benchmarks/`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

Measure = Callable[[], dict[str, Any]]
_PR_SET_PDEATHSIG = 1
_SENTENCE = "The {} of house number {} was painted in the year {}. "
_THINGS = ("door", "roof", "garden wall", "kitchen", "staircase", "cellar", "gate", "window frame")


class WorkerError(Exception):
    """Something to tell the user in one line."""


# --- benchmarks of `kvboost bench` ---------------------------------------------------------------


def command_measure(arguments: Sequence[str]) -> Measure:
    """Run `kvboost bench ARGUMENTS` in this process and return the record that it prints last."""
    import click

    from kvboost.cli.main import main

    _memoise_loading()
    vars(subprocess)["Popen"] = _Child

    def measure() -> dict[str, Any]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main.main(["bench", *arguments], prog_name="kvboost", standalone_mode=False)
            except click.ClickException as error:
                raise WorkerError(error.format_message()) from error
        sys.stderr.write(err.getvalue())
        if isinstance(status, int) and status != 0:
            said = _last_line(err.getvalue()).removeprefix("error: ")
            raise WorkerError(said or f"kvboost bench ended with status {status}")
        return _record_in(out.getvalue())

    return measure


def _memoise_loading() -> None:
    """Every run opens a fresh engine with an empty cache, on a model that is loaded only once."""
    import transformers

    for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        auto_class.from_pretrained = _memoised(auto_class.from_pretrained)


class _Child(subprocess.Popen[Any]):
    """A process with this Python runs this side's kvboost, even where a benchmark leaves PYTHONPATH out.

    `kvboost bench serve` does, for the sake of other programs: both sides would run the installed kvboost.
    """

    def __init__(self, args: Any, *, env: Any = None, **options: Any) -> None:
        if env is not None and not isinstance(args, str) and args[0] == sys.executable:
            env = {**env, "PYTHONPATH": os.environ["PYTHONPATH"]}
        super().__init__(args, env=env, **options)


def _memoised(load: Callable[..., Any]) -> Callable[..., Any]:
    loaded: dict[str, Any] = {}

    def once(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, sorted(options.items())))
        if key not in loaded:
            loaded[key] = load(*arguments, **options)
        return loaded[key]

    return once


def _record_in(printed: str) -> dict[str, Any]:
    line = _last_line(printed)
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise WorkerError(f"the benchmark's last line is no record in JSON: {line[:80]!r}")
    return record


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# --- benchmarks of our own -----------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WorkerError(f"{self.prog}: {message}")


def own_measure(name: str, arguments: Sequence[str]) -> Measure:
    """`warm`, `decode` or `together` on an engine that has its model."""
    parser = _Parser(prog=name, add_help=False, allow_abbrev=False)
    parser.add_argument("--tokens", type=_count, default=1024)
    parser.add_argument("--tail-tokens", type=_count, default=20)
    parser.add_argument("--new-tokens", type=_count, default=1 if name == "warm" else 32)
    parser.add_argument("--repeat", type=_count, default={"warm": 5, "decode": 3, "together": 1}[name])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--mode")
    if name == "together":
        parser.add_argument("--prompts", type=_count, default=8)
        parser.add_argument("--prefixes", type=_count, default=1)
    options, rest = parser.parse_known_args(list(arguments))
    if name == "decode" and options.new_tokens < 2:
        raise WorkerError("decode: --new-tokens must be at least 2")
    engine_options = {"max_chunks": None, **keywords(rest)}

    from kvboost import KVBoost

    engine = KVBoost.from_pretrained(options.model, **engine_options)
    shared = shared_tokens(engine.tokenize, options.tokens)
    if name == "together":
        batches = _batches(engine, shared, options)
        return lambda: _together([next(batches) for _ in range(options.repeat)])
    engine.warm(shared)
    answers = _answers(engine, shared, options)
    return lambda: OWN[name]([next(answers) for _ in range(options.repeat)])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def keywords(arguments: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--switch` and `--no-switch` as keywords of `from_pretrained`."""
    found: dict[str, Any] = {}
    words = [part for word in arguments for part in _split(word)]
    while words:
        flag = words.pop(0)
        if not flag.startswith("--"):
            raise WorkerError(f"expected an option of the engine, got {flag!r}")
        name = flag[2:].replace("-", "_")
        if words and not words[0].startswith("--"):
            found[name] = _value(words.pop(0))
        elif name.startswith("no_"):
            found[name[3:]] = False
        else:
            found[name] = True
    return found


def _split(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def shared_tokens(tokenize: Callable[[str], list[int]], count: int) -> list[int]:
    """`count` token ids of plain sentences, the same on both sides."""
    chosen = random.Random(0)
    text = ""
    ids: list[int] = []
    while len(ids) < count:
        for _ in range(max(8, count // 8)):
            text += _SENTENCE.format(
                chosen.choice(_THINGS), chosen.randrange(999), chosen.randrange(1500, 2000)
            )
        ids = tokenize(text)
    return ids[:count]


def _answers(engine: Any, shared: list[int], options: argparse.Namespace) -> Iterator[Any]:
    """Results of `generate`, each with a new tail; both sides get the same ones."""
    chosen = random.Random(1)
    settings = _settings(options)
    while True:
        result = engine.generate(shared + chosen.choices(shared, k=options.tail_tokens), **settings)
        if result.cached_tokens * 2 < len(shared):
            raise WorkerError(
                f"only {result.cached_tokens} of {len(shared)} tokens that were read before came from the "
                "cache, so this is no warm prompt"
            )
        yield result


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    settings = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}
    return settings if options.mode is None else {**settings, "mode": options.mode}


def _batches(
    engine: Any, words: list[int], options: argparse.Namespace
) -> Iterator[tuple[float, Sequence[Any]]]:
    """Seconds and results of `generate_batch`, each with new prefixes; both sides get the same ones."""
    chosen = random.Random(1)
    while True:
        prefixes = [chosen.choices(words, k=options.tokens) for _ in range(options.prefixes)]
        prompts = [
            prefixes[number % len(prefixes)] + chosen.choices(words, k=options.tail_tokens)
            for number in range(options.prompts)
        ]
        started = time.perf_counter()
        results = engine.generate_batch(prompts, **_settings(options))
        yield time.perf_counter() - started, results


def _together(batches: list[tuple[float, Sequence[Any]]]) -> dict[str, Any]:
    """Time and rate of whole batches, whose shared beginnings are computed in the call."""
    seconds = statistics.median(seconds for seconds, _ in batches)
    generated = min(sum(result.generated_tokens for result in results) for _, results in batches)
    return {
        "benchmark": "together",
        "seconds": seconds,
        "tokens_per_s": generated / seconds,
        "generated_tokens": generated,
    }


def _warm(results: list[Any]) -> dict[str, Any]:
    """Time to the first token."""
    return {
        "benchmark": "warm",
        "ttft_ms": statistics.median(result.ttft_ms for result in results),
        "cached_tokens": min(result.cached_tokens for result in results),
    }


def _decode(results: list[Any]) -> dict[str, Any]:
    """Time per token behind the first one."""
    times = [(result.total_ms - result.ttft_ms) / (result.generated_tokens - 1) for result in results]
    return {
        "benchmark": "decode",
        "ms_per_token": statistics.median(times),
        "generated_tokens": min(result.generated_tokens for result in results),
        "cached_tokens": min(result.cached_tokens for result in results),
    }


OWN: dict[str, Callable[[list[Any]], dict[str, Any]]] = {
    "warm": _warm,
    "decode": _decode,
    "together": _together,
}


# --- being told what to do -----------------------------------------------------------------------


def main() -> None:
    """Say what was imported, then measure once per line until there are no more."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries and child processes print must not get between the answers

    def answer(produce: Callable[[], dict[str, Any]]) -> bool:
        try:
            reply, is_good = produce(), True
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever it is, the other process must hear of it
            traceback.print_exc()
            reply, is_good = {"error": _in_one_line(error)}, False
        answers.write(json.dumps(reply) + "\n")
        return is_good

    name, *arguments = sys.argv[1:]
    measures: list[Measure] = []

    def prepare() -> dict[str, Any]:
        measures.append(own_measure(name, arguments) if name in OWN else command_measure([name, *arguments]))
        return {"prepared": name}

    def measure() -> dict[str, Any]:
        gc.collect()
        return {"record": measures[0]()}

    if not answer(_what_was_imported) or not sys.stdin.readline() or not answer(prepare):
        return
    while sys.stdin.readline():
        if not answer(measure):
            return


def _end_with_parent() -> None:
    """Where the system can, be killed when the other process is: who stands still hears of nothing else."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _what_was_imported() -> dict[str, Any]:
    import kvboost

    return {"imported": kvboost.__file__}


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, WorkerError) or type(error).__module__.startswith("kvboost"):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
