"""`python -m tests.fuzz SEED [MINUTES]`: rounds from a seed on, until the time is up or one fails."""

from __future__ import annotations

import sys
import time

from tests.fuzz.hunt import hunt
from tests.fuzz.machine import chosen_groups, chosen_kinds
from tests.fuzz.reference import Tally

EXAMPLES, STEPS = 20, 50


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    minutes = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    started, tally = time.monotonic(), Tally()
    while True:
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
            print(f"seed {number} fails", flush=True)  # noqa: T201
            raise
        number += 1
        print(f"{time.monotonic() - started:.0f} s, seeds to {number}: {tally.summary()}", flush=True)  # noqa: T201
        if time.monotonic() - started >= 60 * minutes:
            return


if __name__ == "__main__":
    main()
