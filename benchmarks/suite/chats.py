"""Synthetic chats as token ids: who asks what when, for replaying against a store.

A few assistants (system prompts) and a crowd of users, both with Zipf popularity. A chat begins
with its assistant's system prompt and what is known about its user, so chats share the first with
many others and the second with earlier chats of the same user. Turns of several chats interleave.
Tokens are drawn at random: two texts agree only where one was copied. Knows no store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_VOCABULARY = 150_000


@dataclass(frozen=True)
class ChatSettings:
    """How many chats of what shape. Ranges include both ends; lengths are tokens."""

    chats: int = 300
    turns: tuple[int, int] = (3, 8)
    assistants: int = 20
    users: int = 100
    zipf_exponent: float = 1.0
    open_chats: int = 20  # chats that go on at the same time
    system_tokens: tuple[int, int] = (200, 1_200)
    profile_tokens: tuple[int, int] = (50, 400)
    question_tokens: tuple[int, int] = (20, 200)
    answer_tokens: tuple[int, int] = (50, 300)


@dataclass(frozen=True)
class ChatTurn:
    """One request: the whole chat so far with a new question, and the answer. Both `[tokens]`."""

    prompt: np.ndarray
    answer: np.ndarray

    @property
    def text(self) -> np.ndarray:
        """What is stored after the request."""
        return np.concatenate([self.prompt, self.answer])


def replayed_turns(settings: ChatSettings, seed: int) -> list[ChatTurn]:
    """All turns of all chats in the order in which they come; the same seed gives the same ones."""
    random = np.random.default_rng(seed)
    beginnings = _Beginnings(settings, random)
    waiting = [_chat(settings, beginnings.draw(), random) for _ in range(settings.chats)]
    waiting.reverse()
    going: list[Iterator[ChatTurn]] = []
    turns: list[ChatTurn] = []
    while waiting or going:
        while waiting and len(going) < settings.open_chats:
            going.append(waiting.pop())
        chat = going[int(random.integers(len(going)))]
        turn = next(chat, None)
        if turn is None:
            going.remove(chat)
        else:
            turns.append(turn)
    return turns


class _Beginnings:
    """System prompts and user profiles; every user has one assistant."""

    def __init__(self, settings: ChatSettings, random: np.random.Generator) -> None:
        self._random = random
        systems = [_text(random, settings.system_tokens) for _ in range(settings.assistants)]
        of_user = random.choice(
            settings.assistants, settings.users, p=_zipf(settings.assistants, settings.zipf_exponent)
        )
        self._texts = [
            np.concatenate([systems[assistant], _text(random, settings.profile_tokens)])
            for assistant in of_user
        ]
        self._popularity = _zipf(settings.users, settings.zipf_exponent)

    def draw(self) -> np.ndarray:
        """The beginning of a chat of one of the users."""
        return self._texts[int(self._random.choice(len(self._texts), p=self._popularity))]


def _chat(settings: ChatSettings, text: np.ndarray, random: np.random.Generator) -> Iterator[ChatTurn]:
    low, high = settings.turns
    for _ in range(int(random.integers(low, high + 1))):
        prompt = np.concatenate([text, _text(random, settings.question_tokens)])
        turn = ChatTurn(prompt, _text(random, settings.answer_tokens))
        yield turn
        text = turn.text


def _text(random: np.random.Generator, length: tuple[int, int]) -> np.ndarray:
    return random.integers(0, _VOCABULARY, int(random.integers(length[0], length[1] + 1)))


def _zipf(count: int, exponent: float) -> np.ndarray:
    """Probabilities of the ranks 1 to `count`."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    return np.asarray(weights / weights.sum())
