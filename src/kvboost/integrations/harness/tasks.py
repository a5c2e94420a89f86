"""Running lm_eval's tasks on an engine: finding them by name, and the results with what was reused.

Knows lm_eval's tasks and its runner; what a request becomes is `model`'s business.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvboost.engine import InferenceEngine
from kvboost.errors import InvalidRequestError
from kvboost.integrations.harness.model import KVBoostLM


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
        return wanted, own  # lm_eval's own thousands of task files take seconds to read
    manager = TaskManager(include_path=paths or None)
    found: list[str] = []
    for name in wanted:
        matches = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matches:
            where = f"lm_eval or {', '.join(paths)}" if paths else "lm_eval; your own need include_path"
            raise InvalidRequestError(f"there is no task {name!r} in {where}")
        found += [match for match in matches if match not in found]
    return found, manager
