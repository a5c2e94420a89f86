"""How many prompt tokens a step may take, so that the next tokens of other answers come on time.

Knows how long steps took, no sequences.
"""

from __future__ import annotations

_MAX_BUDGET = {False: 256, True: 2048}  # prompt tokens of one step, on a CPU and on a GPU
_OFFLINE_BUDGET = {False: 2048, True: 8192}  # where nobody waits for single tokens
_MIN_BUDGET = 16
# How many times as long a step may take for the prompt tokens in it: the first, and up to the second where
# sequences in prefill outnumber those that decode.
_SLOWDOWN = (6.0, 12.0)
_MEASURE_EVERY = 32  # mixed steps; then one without prompt tokens, to see how long that takes
_ROUND = ((64, 64), (16, 8))  # above so many tokens in a step, multiples of this: few shapes, few kernels
_MEMORY = 0.8  # weight of earlier measurements in the running means


class Pace:
    """The budget of prompt tokens for each step, by how long steps took before; `offline`, the largest."""

    def __init__(self, *, on_gpu: bool, offline: bool = False) -> None:
        self._offline = offline
        self._most = (_OFFLINE_BUDGET if offline else _MAX_BUDGET)[on_gpu]
        self._step_s = 0.0  # of a step without prompt tokens
        self._mixed_steps = 0  # since the last step without prompt tokens
        self.token_s = 0.0  # of a prompt token, as measured

    def budget(self, decoding: int, waiting: int) -> int:
        """Prompt tokens for the next step, in which `decoding` sequences get a token; `waiting` have none."""
        if self._offline:
            return self._most
        if decoding and self._mixed_steps >= _MEASURE_EVERY:
            return 0  # how long a step takes without prompt tokens may have changed
        allowed = float(self._most)
        if decoding and self.token_s and self._step_s:
            slowdown = min(_SLOWDOWN[1], _SLOWDOWN[0] * max(1.0, waiting / decoding))
            allowed = min(allowed, max(_MIN_BUDGET, (slowdown - 1) * self._step_s / self.token_s))
        least = min(_MIN_BUDGET, int(allowed))
        return max(least, _rounded(int(allowed) + decoding) - decoding)

    def record(self, seconds: float, decoding: int, prompt_tokens: int) -> None:
        """Note that a step of so many tokens took `seconds`."""
        self._mixed_steps += 1 if prompt_tokens and decoding else 0
        if not prompt_tokens:
            is_old = self._mixed_steps >= _MEASURE_EVERY
            self._step_s = seconds if is_old else _mean(self._step_s, seconds)
            self._mixed_steps = 0
        elif not decoding:
            self.token_s = _mean(self.token_s, seconds / prompt_tokens)
        elif self._step_s:
            self.token_s = _mean(self.token_s, max(0.0, seconds - self._step_s) / prompt_tokens)


def _rounded(tokens: int) -> int:
    for above, step in _ROUND:
        if tokens > above:
            return tokens // step * step
    return tokens


def _mean(so_far: float, value: float) -> float:
    return value if not so_far else _MEMORY * so_far + (1 - _MEMORY) * value
