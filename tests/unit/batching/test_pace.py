"""How many prompt tokens a step takes, by how long steps took."""

from __future__ import annotations

from kvboost.batching.pace import Pace


def test_long_prompts_go_in_blocks() -> None:
    """With tokens to come on time, a step takes as many prompt tokens as it can bear."""
    pace = Pace(on_gpu=False)
    assert pace.budget(0, 1) == 256  # nothing is known yet
    assert pace.budget(3, 1) + 3 == 256
    pace.record(0.1, 3, 0)
    pace.record(1.0, 0, 250)
    assert pace.budget(0, 1) == 256
    assert pace.budget(3, 1) + 3 == 128  # (6 - 1) x 0.1 s at 4 ms per token, and few sizes of steps
    assert pace.budget(3, 5) + 3 == 192  # more wait for their first token
    assert pace.budget(4, 30) + 4 == 256
    for _ in range(31):
        pace.record(1.1, 3, 10)  # attention grows with the text
    assert pace.budget(3, 1) == 16
    pace.record(1.1, 3, 10)
    assert pace.budget(3, 1) == 0  # a step by itself is timed again
    pace.record(0.5, 3, 0)
    assert pace.budget(3, 1) > 16


def test_prompts_go_on_however_many_decode() -> None:
    """Rounding leaves some prompt tokens to every step, and now and then a step is timed without any."""
    pace = Pace(on_gpu=False)
    pace.record(0.1, 1, 0)
    pace.record(1.0, 0, 40)
    for decoding in range(1, 200):
        assert pace.budget(decoding, 1) >= 16
    slow = Pace(on_gpu=False)
    slow.record(0.01, 1, 0)  # one short sequence
    slow.record(0.5, 0, 250)
    blocks = []
    for _ in range(200):
        block = slow.budget(31, 1)
        blocks.append(block)
        slow.record(0.2 + 0.002 * block, 31, block)  # in truth 31 long sequences take 200 ms
    assert blocks.count(0) >= 4
    assert max(blocks[150:]) == 225, "6 x 0.2 s allow 500 tokens; 256 is the most"
