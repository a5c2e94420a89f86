"""The fuzzer for ten minutes, with seeds of its own in every run.

KVBOOST_FUZZ_MINUTES sets another time, KVBOOST_FUZZ_SEED the first seed; the result is kept where it was at
least the ten minutes and everything took part.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.equivalence.proofs import write_result
from tests.fuzz.hunt import hunt
from tests.fuzz.machine import GROUPS, chosen_groups, chosen_kinds
from tests.fuzz.reference import Tally
from tests.fuzz.subject import KINDS

MINUTES = float(os.environ.get("KVBOOST_FUZZ_MINUTES", "10"))
WHOLE_MINUTES = 10.0
EXAMPLES, STEPS = 20, 50  # of a round, and of an example


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 1200)
def test_fuzz_soak(capsys: pytest.CaptureFixture[str]) -> None:
    first = int(os.environ.get("KVBOOST_FUZZ_SEED", random.SystemRandom().randrange(1_000_000)))
    tally, rounds = Tally(), 0
    while rounds == 0 or time.monotonic() - tally.started_at < 60 * MINUTES:
        number = first + rounds
        try:
            hunt(
                number,
                examples=EXAMPLES,
                steps=STEPS,
                groups=chosen_groups(),
                kinds=chosen_kinds(),
                tally=tally,
            )
        except BaseException:
            with capsys.disabled():
                print(f"\nseed {number} fails; KVBOOST_FUZZ_SEED={number} repeats it: {tally.summary()}")  # noqa: T201
            raise
        rounds += 1
        with capsys.disabled():
            print(f"\nseeds {first} to {number}: {tally.summary()}", end="", flush=True)  # noqa: T201
    assert tally.near_ties <= tally.checks // 50
    if MINUTES >= WHOLE_MINUTES and chosen_groups() == GROUPS and chosen_kinds() == KINDS:
        summary = {"minutes": MINUTES, "rounds": rounds, "first_seed": first, **tally.summary()}
        write_result("soak-fuzz", summary, [], model=", ".join(KINDS) + " (tiny, random)")
