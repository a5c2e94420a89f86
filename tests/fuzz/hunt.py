"""Running the machine: a round has a seed, and the same seed finds the same failure again."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.machine import GROUPS, Machine
from tests.fuzz.reference import Tally
from tests.fuzz.subject import KINDS


def hunt(
    number: int,
    *,
    examples: int,
    steps: int,
    kinds: Iterable[str] = KINDS,
    groups: frozenset[str] = GROUPS,
    tally: Tally | None = None,
    shrink: bool = True,
) -> Tally:
    """One round with the seed `number`; raises with the shortest sequence of steps that fails."""
    counted = Tally() if tally is None else tally
    machine = type(
        "Fuzz",
        (Machine,),
        {"groups": groups, "kinds": tuple(kinds), "tally": counted, "__module__": __name__},
    )
    run_state_machine_as_test(
        seed(number)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            verbosity=Verbosity.normal,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return counted
