"""Several threads at once, whose errors are raised in the test's own, and one thread for torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch


def at_once(*functions: Callable[[], object], seconds: float = 120.0) -> None:
    """Run them together; the first error of any is raised, and none may take longer than `seconds`."""
    errors: list[BaseException] = []
    together = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        try:
            together.wait(timeout=seconds)
            function()
        except BaseException as error:  # handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=seconds)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def in_threads(count: int, work: Callable[[int], object], seconds: float = 120.0) -> None:
    """Run `work(number)` in `count` threads together."""
    at_once(*(partial(work, number) for number in range(count)), seconds=seconds)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Tiny models lose more by waiting for a second core than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
