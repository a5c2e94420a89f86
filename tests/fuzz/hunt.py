"""Running the machine: a round has a seed, and the same seed meets the same failure again.

The example that fails is made shorter here and not by hypothesis: leaving out whole steps is what helps, and
takes a minute.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterable
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.machine import GROUPS, Machine
from tests.fuzz.reference import Tally
from tests.fuzz.subject import KINDS
from tests.reuse_warnings import approximate_reuse_expected

SHORTENING_SECONDS = 90.0
Steps = list[tuple[str, dict[str, Any]]]


class FuzzError(AssertionError):
    """A failure with its seed and the shortest example that was found."""


def hunt(
    number: int,
    *,
    examples: int,
    steps: int,
    kinds: Iterable[str] = KINDS,
    groups: frozenset[str] = GROUPS,
    tally: Tally | None = None,
    resident: bool = False,
) -> Tally:
    """One round with the seed `number`; raises FuzzError with the shortest steps that fail.

    With `resident`, single requests run in the engine's own batch, as they do on a GPU.
    """
    counted = Tally() if tally is None else tally
    own = {"groups": groups, "kinds": tuple(kinds), "tally": counted, "resident": resident}
    own["__module__"] = __name__
    machine: type[Machine] = type("Fuzz", (Machine,), own)
    with approximate_reuse_expected(), warnings.catch_warnings():
        # transformers about options of the caller's that do not fit together, and which it then follows
        warnings.filterwarnings("ignore", category=UserWarning, module="transformers")
        try:
            _run(seed(number)(machine), examples, steps)
        except Exception as error:
            shortest, found = shortened(machine, counted.failed_steps, error)
            shown = "\n".join(f"    {name}({_arguments(drawn)})" for name, drawn in shortest)
            when = f"met after {counted.failed_after_s or 0:.1f} s"
            raise FuzzError(
                f"seed {number}, {when}: {type(found).__name__}: {found}\n{shown}\n{counted.summary()}"
            ) from found
    return counted


def _run(machine: type[Machine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def replayed(machine: type[Machine], steps: Steps) -> Exception | None:
    """What fails where these steps are run."""
    subject = machine()
    try:
        for name, drawn in steps:
            getattr(subject, name)(**drawn)
            subject.stores_are_sound()
    except Exception as error:
        return error
    finally:
        subject.teardown()
    return None


def shortened(machine: type[Machine], steps: Steps, error: Exception) -> tuple[Steps, Exception]:
    """Steps without those that the failure does not need, and how it fails then; the first step stays."""
    until = time.monotonic() + SHORTENING_SECONDS
    size = max(1, len(steps) // 2)
    while steps and size and time.monotonic() < until:
        for start in itertools.count(1, size):
            if start >= len(steps) or time.monotonic() >= until:
                break
            while start < len(steps):
                fewer = steps[:start] + steps[start + size :]
                found = replayed(machine, fewer)
                if found is None:
                    break
                steps, error = fewer, found
        size //= 2
    return steps, error


def _arguments(drawn: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in drawn.items())
