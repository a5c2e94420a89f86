"""EleutherAI's lm-evaluation-harness on a kvboost engine: what prompts share is read once.

    python -m kvboost.integrations.lm_eval --model builtin --tasks arc_easy --num-fewshot 5

lm_eval has no plug-in discovery: importing this module registers the model name `kvboost` with it, and
`evaluate` is the short way to run tasks. Scores are those of lm_eval's own `hf` model. Knows lm_eval and the
engine's public calls, no cache. Needs `pip install kvboost[eval]`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import jinja2
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvboost.batching.workload import check_batch_tokens
from kvboost.choices import GenerationMode, choice
from kvboost.engine import InferenceEngine
from kvboost.errors import InvalidRequestError, KVBoostError
from kvboost.kv import rope
from kvboost.models import GenerationResult, ScoreResult

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
        resolve_max_length,
    )
    from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window
except ImportError as error:
    _MISSING = f"kvboost.integrations.lm_eval needs lm_eval ({error}); pip install kvboost[eval]"
    if __name__ == "__main__":
        raise SystemExit(f"error: {_MISSING}") from error
    raise ImportError(_MISSING) from error

NAME = "kvboost"
INTERRUPTED = 130
_LOOK_BACK = 2  # tokens more than a stop text has by itself: in an answer it may be cut otherwise
_logger = logging.getLogger(__name__)

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


class KVBoostLM(TemplateLM):
    """A model for lm_eval's runner. Requests of one kind go to the engine together.

    `pretrained` is an engine, or what `from_pretrained` loads with `engine_options`; then `close` closes it.
    Of contexts longer than `max_length` the last tokens are kept. `batch_size` can only be "auto": the engine
    fills its batches by tokens, up to `max_batch_tokens`.
    """

    def __init__(
        self,
        pretrained: str | InferenceEngine = "builtin",
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        max_batch_tokens: int | None = None,
        batch_size: str | int | None = None,
        **engine_options: Any,
    ) -> None:
        super().__init__()
        if batch_size not in (None, "auto"):
            raise InvalidRequestError(
                f'batch_size must be "auto", got {batch_size!r}: kvboost fills its batches by tokens; '
                "max_batch_tokens bounds them"
            )
        for name, value in (("max_length", max_length), ("max_gen_toks", max_gen_toks)):
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidRequestError(f"{name} must be an integer of at least 1, got {value!r}")
        if not isinstance(pretrained, str) and engine_options:
            raise InvalidRequestError(
                f"{', '.join(engine_options)}: options cannot be changed when the engine is there already"
            )
        check_batch_tokens(max_batch_tokens)
        checked_mode = choice(GenerationMode, "mode", mode)
        self._owns_engine = isinstance(pretrained, str)
        self.engine = (
            InferenceEngine.from_pretrained(pretrained, **engine_options)
            if isinstance(pretrained, str)
            else pretrained
        )
        self.tokenizer = self.engine.tokenizer
        self._device = self.engine.model.device
        self.max_gen_toks = max_gen_toks
        self.max_length = self._checked_max_length(max_length)
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._sharing: dict[str, Any] = {"mode": checked_mode, "max_batch_tokens": max_batch_tokens}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        if self.eot_token_id is None:
            raise InvalidRequestError(
                "lm_eval needs a tokenizer with an end-of-text token; this one has none"
            )

    def _checked_max_length(self, max_length: int | None) -> int:
        model = self.engine.model
        if max_length is None:
            return int(resolve_max_length(model.config, self.tokenizer))
        limit = rope.max_positions(model)
        if limit is not None and max_length > limit:
            raise InvalidRequestError(f"max_length must be at most {limit}, the model's, got {max_length}")
        return max_length

    def close(self) -> None:
        """Close the engine, if it was loaded here."""
        if self._owns_engine:
            self.engine.close()

    # --- what lm_eval asks about ---------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The model's configuration; lm_eval takes the model's name from it."""
        return self.engine.model.config

    @property
    def eot_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> Any:
        """What stands before a continuation without a context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes into its results about the model."""
        model = self.engine.model
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "model_dtype": str(model.dtype),
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None
    ) -> list[int]:
        """Token ids; special tokens are not added to a text that begins with the prefix token already."""
        if add_special_tokens is None:
            starts = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = False if string.startswith(starts) else self._add_bos_token
        ids = self._encode(string, add_special_tokens)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _encode(self, string: str, add_special_tokens: bool | None) -> list[int]:
        """Token ids; None = as the tokenizer does by itself."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as text; a template that takes no system message gets the others."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )
        except jinja2.TemplateError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
            _logger.warning("the chat template refused a system message (%s); it is left out", error)
            return self.apply_chat_template(others, add_generation_prompt)
        except ValueError as error:
            raise InvalidRequestError(f"messages need a chat template: {error}") from error

    # --- log-likelihoods -----------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of every continuation, and whether it is the greedy one."""
        contexts, continuations, shortened = [], [], 0
        for texts, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise InvalidRequestError(
                    f"a context needs at least 1 token and a continuation from 1 to max_length="
                    f"{self.max_length}, got {len(context)} and {len(continuation)}: {_shortened(texts)}"
                )
            # The continuation's last token is not read, so that one more fits.
            room = self.max_length + 1 - len(continuation)
            shortened += len(context) > room
            contexts.append(context[-room:])
            continuations.append(continuation)
        self._report_shortened(shortened, len(requests))
        results = self.engine.score(
            contexts, continuations, progress=False if disable_tqdm else None, **self._sharing
        )
        self._count(results)
        answers = [(result.log_likelihood, result.is_greedy) for result in results]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` that predict every token once."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for number, (score, _) in zip(owners, scores, strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- answers -------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop text; requests with the same options go together."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            key = json.dumps(request.args[1], sort_keys=True, default=repr)
            alike.setdefault(key, []).append(number)
        answers = [""] * len(requests)
        for numbers in alike.values():
            contexts = [requests[number].args[0] for number in numbers]
            options = requests[numbers[0]].args[1]
            for number, answer in zip(numbers, self._answers(contexts, options, disable_tqdm), strict=True):
                answers[number] = answer
                self.cache_hook.add_partial("generate_until", requests[number].args, answer)
        return answers

    def _answers(
        self, contexts: Sequence[str], gen_kwargs: dict[str, Any], disable_tqdm: bool
    ) -> Iterator[str]:
        options = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        stops = handle_stop_sequences(options.pop("until"), eos=self.tokenizer.decode(self.eot_token_id))
        new_tokens = options.pop("max_gen_toks")
        temperature = options.pop("temperature", 0.0)
        room = self.max_length - new_tokens
        if room < 1:
            raise InvalidRequestError(
                f"max_gen_toks must be less than max_length={self.max_length}, got {new_tokens}"
            )
        prompts = [self._encode_prompt(context) for context in contexts]
        self._report_shortened(sum(len(prompt) > room for prompt in prompts), len(prompts))
        prompts = [prompt[-room:] for prompt in prompts]
        results = self.engine.generate_many(
            prompts,
            new_tokens,
            temperature if options["do_sample"] else 1.0,
            options.pop("do_sample"),
            progress=False if disable_tqdm else None,
            stopping_criteria=StoppingCriteriaList([StopText(self.tokenizer, stops, prompts)]),
            **self._sharing,
            **options,
        )
        self._count(results)
        for result in results:
            yield str(postprocess_generated_text(result.output_text, stops, None))

    def _encode_prompt(self, context: str) -> list[int]:
        """A context to be continued, which may be empty."""
        begin = self.tokenizer.bos_token
        has_begin = begin is not None and context.startswith(begin)
        return self._encode(context, False if has_begin else self._add_bos_token) or [self.prefix_token_id]

    # --- small parts ---------------------------------------------------------------------------

    def _count(self, results: Sequence[ScoreResult] | Sequence[GenerationResult]) -> None:
        self.prompt_tokens += sum(result.prompt_tokens for result in results)
        self.cached_tokens += sum(result.cached_tokens for result in results)

    def _report_shortened(self, count: int, total: int) -> None:
        if count:
            _logger.warning(
                "%d of %d requests are longer than max_length=%d and lose their first tokens",
                count,
                total,
                self.max_length,
            )


class StopText(StoppingCriteria):  # type: ignore[misc, unused-ignore]
    """Ends an answer when one of `stops` stands in it; what stands in the prompt does not count.

    It sees rows of tokens and is not told where their prompts end. A row is known by the tokens before its
    newest; where two prompts could be meant, the longer one is. So it may stop late, never early, and what
    is behind a stop text is cut off anyway.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        encoded = [tokenizer(stop, add_special_tokens=False)["input_ids"] for stop in self._stops]
        self._window = max(map(len, encoded), default=0) + _LOOK_BACK
        self._prompt_tokens: dict[int, int] = {}  # by the hash of a row so far
        for prompt in prompts:
            self._note(torch.tensor(prompt), len(prompt))

    def _note(self, row: torch.Tensor, prompt_tokens: int) -> None:
        key = _hash(row)
        self._prompt_tokens[key] = max(prompt_tokens, self._prompt_tokens.get(key, 0))

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
        ended = [self._has_ended(row) for row in input_ids.cpu()]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)

    def _has_ended(self, row: torch.Tensor) -> bool:
        prompt_tokens = self._prompt_tokens.get(_hash(row[:-1]))
        if prompt_tokens is None:
            return False
        self._note(row, prompt_tokens)
        latest = row[max(prompt_tokens, len(row) - self._window) :]
        text = self._tokenizer.decode(latest.tolist())
        return any(stop in text for stop in self._stops)


def _hash(row: torch.Tensor) -> int:
    return hash(row.numpy().tobytes())


def _shortened(texts: tuple[str, str] | None) -> str:
    """Both texts, as much as fits into a message."""
    if texts is None:
        return "a window of a text"
    context, continuation = texts
    return f"{context[-40:]!r} with {continuation[:40]!r}"


# --- running tasks -------------------------------------------------------------------------------


def evaluate(
    model: str | InferenceEngine | KVBoostLM = "builtin",
    tasks: str | Sequence[str] = (),
    *,
    num_fewshot: int | None = None,
    include_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    limit: int | float | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    gen_kwargs: dict[str, Any] | None = None,
    log_samples: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Run lm_eval tasks and return its results, with `results["kvboost"]` on what was reused.

    `tasks` are names, or patterns such as "arc_*"; `include_path` is a folder with task files of your own.
    `options` are those of `KVBoostLM` and of the engine. As always with lm_eval, the seeds of `random`, numpy
    and torch are set.
    """
    from lm_eval import simple_evaluate

    started = time.perf_counter()
    _check_numbers(num_fewshot, limit)
    names, manager = _find_tasks(tasks, include_path)  # before a model is loaded
    if isinstance(model, KVBoostLM) and options:
        raise InvalidRequestError(f"{', '.join(options)}: options cannot be changed when the model is there")
    lm = model if isinstance(model, KVBoostLM) else KVBoostLM(model, **options)
    read, cached = lm.prompt_tokens, lm.cached_tokens
    try:
        results = simple_evaluate(
            model=lm,
            tasks=names,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            system_instruction=system_instruction,
            gen_kwargs=gen_kwargs,
            log_samples=log_samples,
        )
    finally:
        if lm is not model:
            lm.close()
    reuse = {
        "prompt_tokens": lm.prompt_tokens - read,
        "cached_tokens": lm.cached_tokens - cached,
        "seconds": round(time.perf_counter() - started, 3),
    }
    return {**results, "kvboost": reuse}


def _check_numbers(num_fewshot: Any, limit: Any) -> None:
    if num_fewshot is not None and (type(num_fewshot) is not int or num_fewshot < 0):
        raise InvalidRequestError(
            f"num_fewshot must be None or an integer of at least 0, got {num_fewshot!r}"
        )
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
        raise InvalidRequestError(
            f"limit must be None, a number of questions, or a share below 1, got {limit!r}"
        )


def _find_tasks(tasks: str | Sequence[str], include_path: Any) -> tuple[list[str], Any]:
    """The names that `tasks` mean, and lm_eval's task manager that knows them."""
    from lm_eval.tasks import TaskManager

    wanted = [tasks] if isinstance(tasks, str) else list(tasks)
    if not wanted:
        raise InvalidRequestError("tasks must name at least one task")
    folders = [include_path] if isinstance(include_path, str | os.PathLike) else list(include_path or ())
    for folder in folders:
        if not Path(folder).is_dir():
            raise InvalidRequestError(f"include_path must be a folder with task files, got {str(folder)!r}")
    paths = [str(folder) for folder in folders]
    own = TaskManager(include_path=paths, include_defaults=False) if paths else None
    if own is not None and all(name in own.all_subtasks for name in wanted):
        return wanted, own  # reading lm_eval's own thousands of task files takes seconds
    manager = TaskManager(include_path=paths or None)
    found: list[str] = []
    for name in wanted:
        matches = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matches:
            where = f"lm_eval or {', '.join(paths)}" if paths else "lm_eval; your own need include_path"
            raise InvalidRequestError(f"there is no task {name!r} in {where}")
        found += [match for match in matches if match not in found]
    return found, manager


# --- the command line ----------------------------------------------------------------------------


def _read_option(_context: Any, _parameter: Any, values: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; values are read as JSON where they are some, as text otherwise."""
    options: dict[str, Any] = {}
    for pair in values:
        name, sign, value = pair.partition("=")
        if not sign or not name.isidentifier():
            raise click.BadParameter(f"expected NAME=VALUE, got {pair!r}")
        constant = {"none": "null", "true": "true", "false": "false"}.get(value.lower(), value)
        try:
            options[name] = json.loads(constant)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _read_limit(_context: Any, _parameter: Any, value: float | None) -> int | float | None:
    return int(value) if value is not None and value == int(value) else value


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option("--tasks", required=True, help="Names of tasks, with commas between them; * matches anything.")
@click.option(
    "--include-path",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="A folder with task files of your own. May be given several times.",
)
@click.option(
    "--num-fewshot", type=click.IntRange(min=0), help="Examples before every question. [default: the task's]"
)
@click.option(
    "--limit",
    type=click.FloatRange(min=0, min_open=True),
    callback=_read_limit,
    help="So many questions of every task, or a share below 1.",
)
@click.option("--chat", is_flag=True, help="Put prompts into the model's chat template.")
@click.option("--system", metavar="TEXT", help="A system instruction.")
@click.option(
    "--gen-option",
    "gen_kwargs",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read_option,
    help="Generation option of lm_eval, over the task's own, e.g. max_gen_toks=64.",
)
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read_option,
    help="Option of the engine or of KVBoostLM, e.g. dtype=bfloat16, max_chunks=none, max_length=2048.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of a table.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON here.")
@click.option("--log-samples", is_flag=True, help="Put every question with its answer into --output.")
@click.option("--verbose", is_flag=True, help="Show what lm_eval reports while it works.")
@click.option("--debug", is_flag=True, help="Show the stack trace of an error.")
def main(
    model: str,
    tasks: str,
    include_path: tuple[str, ...],
    num_fewshot: int | None,
    limit: int | float | None,
    chat: bool,
    system: str | None,
    gen_kwargs: dict[str, Any],
    options: dict[str, Any],
    as_json: bool,
    output: Path | None,
    log_samples: bool,
    verbose: bool,
    debug: bool,
) -> None:
    """Run tasks of lm-evaluation-harness on a kvboost engine.

    The scores are those of lm_eval's own "hf" model; the examples before the questions, and the question
    before its choices, are read once.

    \b
    python -m kvboost.integrations.lm_eval --tasks arc_easy --num-fewshot 5 --limit 100
    python -m kvboost.integrations.lm_eval --tasks mine --include-path tasks --json
    python -m kvboost.integrations.lm_eval --model Qwen/Qwen3-0.6B --tasks gsm8k --chat -o dtype=bfloat16
    """
    if log_samples and output is None:
        raise click.UsageError("--log-samples needs --output FILE")
    if output is not None and not output.absolute().parent.is_dir():
        raise click.UsageError(f"--output: there is no folder {output.absolute().parent}")
    try:
        with _quiet(verbose=verbose):
            results = evaluate(
                model,
                [name.strip() for name in tasks.split(",") if name.strip()],
                num_fewshot=num_fewshot,
                include_path=include_path or None,
                limit=limit,
                apply_chat_template=chat,
                system_instruction=system,
                gen_kwargs=gen_kwargs or None,
                log_samples=log_samples,
                **options,
            )
        text = json.dumps(results, default=handle_non_serializable, ensure_ascii=False)
        if output is not None:
            output.write_text(text + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:  # tasks, data sets and models raise what they like
        if debug:
            raise
        kind = "" if isinstance(error, KVBoostError | OSError) else f"{type(error).__name__}: "
        click.secho(f"error: {kind}{' '.join(str(error).split())}", fg="red", err=True)
        sys.exit(1)
    results.pop("samples", None)
    if as_json:
        click.echo(json.dumps(results, default=handle_non_serializable, ensure_ascii=False))
    else:
        _show(results)


@contextlib.contextmanager
def _quiet(*, verbose: bool) -> Iterator[None]:
    """Only what matters on stderr, unless more is asked for."""
    import datasets
    from transformers.utils import logging as transformers_logging

    if verbose:
        yield
        return
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)


def _show(results: dict[str, Any]) -> None:
    """A row per task and metric, and what was reused."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("task", overflow="fold")
    for heading in ("shots", "questions", "metric", "value", "stderr"):
        table.add_column(heading, justify="left" if heading == "metric" else "right", no_wrap=True)
    for name, values in {**results["results"], **results.get("groups", {})}.items():
        counts = results.get("n-samples", {}).get(name, {})
        cells = [str(results.get("n-shot", {}).get(name, "")), str(counts.get("effective", ""))]
        for metric, value in values.items():
            label, _, chosen = metric.partition(",")
            if label.endswith("_stderr") or not isinstance(value, float):
                continue
            error = values.get(f"{label}_stderr,{chosen}")
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            label = label if chosen in ("", "none") else f"{label} ({chosen})"
            table.add_row(name, *cells, label, f"{value:.4f}", shown)
            name, cells = "", ["", ""]
    console = Console(highlight=False)
    console.print(table)
    reuse = results["kvboost"]
    console.print(
        f"{reuse['seconds']:,.1f} s; {reuse['cached_tokens']:,} of {reuse['prompt_tokens']:,} prompt tokens "
        "were not read again",
        markup=False,
    )


if __name__ == "__main__":  # as a module of its own name, so that there is one class and not two
    importlib.import_module("kvboost.integrations.lm_eval").main(
        prog_name="python -m kvboost.integrations.lm_eval"
    )
else:
    register_model(NAME)(KVBoostLM)
