"""Chats of agents in which text moves, as token ids: what is sent turn by turn, and which of it moved.

Three cases of twelve turns. In each, the seventh changes something near the front of the prompt, so that
what stands behind it moves: thinking is stripped, the tool list changes, or half of the history becomes a
summary. Tool results are pieces of Python's own language reference with a made-up fact in each; all that an
agent says is scripted. Knows a tokenizer, no model and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

import numpy as np

from kvboost.proof.documents import Document, PromptWriter, Shelf
from kvboost.proof.facts import Needle

TURNS = 12
CHANGE = 6  # the turn in which text moves, counted from 0
READ_BEFORE = 5  # tool results of an agent's first task, up to the user's next message
_HALF = CHANGE // 2
_PAGES_AT_ONCE = 2  # that an exchange of a summarized history reads
_SHORTER = 0.4  # a result that a summary replaces, against one that stays
_SPARE_TOKENS_PER_WORD = 40  # of texts for thoughts and results after the change, by the words of each
_SUBJECTS = ("letters", "ledgers", "maps", "tickets", "permits", "invoices")
_INSTRUCTION = "You answer questions about pages. Call a tool to read a page.\n\nTools:\n"

Part = tuple[str, str]  # a name that is the same wherever the part stands, and its text


@dataclass(frozen=True)
class Question:
    """A fact of an earlier tool result, and the prompt `[tokens]` whose last message asks for it."""

    fact: Needle
    token_ids: np.ndarray


@dataclass(frozen=True)
class AgentTurn:
    """A prompt, `token_ids` `[tokens]`, as an agent sends it.

    `moved` `[n]` are positions of text that stood at others in the turn before. `asked` is the fact that the
    last message asks for, if it asks for one. `questions`, this one first, are prompts that differ in their
    last message, and begin the answer.
    """

    token_ids: np.ndarray
    moved: np.ndarray
    asked: Needle | None = None
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True)
class Message:
    """What is said. Thinking stands before it, where the template keeps it."""

    name: str
    role: str
    text: str
    thinking: str = ""


@dataclass
class Script:
    """What was said so far. Tool results, each with a fact, and other words were drawn beforehand."""

    results: Sequence[Document]
    facts: Sequence[Needle]  # what can be asked for, in random order
    words: Iterator[str]
    thought_words: int
    messages: list[Message] = field(default_factory=list)

    def say(self, role: str, text: str, thinking: str = "") -> None:
        """Add a message."""
        self.messages.append(Message(f"message {len(self.messages)}", role, text, thinking))

    def call(self, page: str, result: str, *, thinking: bool = False) -> None:
        """Call a tool and get its result."""
        thought = f"<think>\n{self.some_words()}\n</think>\n\n" if thinking else ""
        self.say("assistant", f'<tool_call>{{"name": "read", "page": "{page}"}}</tool_call>', thought)
        self.say("user", f"<tool_response>\n{result}\n</tool_response>")

    def look_up(self, number: int, *, thinking: bool = False) -> None:
        """Call a tool and get the result with this number."""
        self.call(self.results[number].fact.name, self.results[number].text, thinking=thinking)

    def some_words(self) -> str:
        """A thought, or a short tool result: words that nobody has used yet."""
        return " ".join(islice(self.words, self.thought_words))


class Stage:
    """Writes chats. Parts are encoded one by one, so that a part has the same ids wherever it stands.

    At the change, tool results of about `moved_tokens` tokens move. A thought has `thought_words` words, and
    so has a tool result after the change.
    """

    def __init__(self, tokenizer: Any, moved_tokens: int, thought_words: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._moved_tokens = moved_tokens
        self._thought_words = thought_words
        self._seed = seed

    def chat(self, case: str, number: int) -> tuple[AgentTurn, ...]:
        """The `number`-th chat of a case; each has texts and facts of its own."""
        return CASES[case](self, number)

    # --- the three cases -----------------------------------------------------------------------

    def stripped_thinking(self, number: int) -> tuple[AgentTurn, ...]:
        """A template like Qwen3's: thinking before the last user message is stripped.

        Five tool calls with thinking before each; then the user asks on, and the results move up. Four more
        calls and another question: only what was said since the first question moves.
        """
        script = self._script(number, [self._moved_tokens // READ_BEFORE] * READ_BEFORE, kept_from=0)
        front = _system(_SUBJECTS[:2])
        script.say("user", "Read the five pages, then say that you are done.")
        prompts = [front + _rendered(script.messages)]
        for place in range(READ_BEFORE):
            script.look_up(place, thinking=True)
            prompts.append(front + _rendered(script.messages))
        script.say("assistant", "I am done.")
        script.say("user", script.facts[0].question)
        prompts.append(front + _rendered(script.messages, since=len(script.messages)))
        for place in range(TURNS - CHANGE - 2):
            script.call(f"note {place}", script.some_words(), thinking=True)
            prompts.append(front + _rendered(script.messages, since=_last_question(script)))
        script.say("assistant", "These notes do not change my answer.")
        script.say("user", script.facts[1].question)
        prompts.append(front + _rendered(script.messages, since=len(script.messages)))
        return self._turns(prompts, {CHANGE: script.facts, TURNS - 1: script.facts[1:]})

    def changed_tools(self, number: int) -> tuple[AgentTurn, ...]:
        """A tool joins the tool list at its front in mid-chat, or, in every other chat, leaves it."""
        script = self._script(number, [self._moved_tokens // CHANGE] * CHANGE, kept_from=0)
        fronts = [_system(_SUBJECTS[1:]), _system(_SUBJECTS)]
        before, after = fronts if number % 2 == 0 else reversed(fronts)
        prompts = []
        for turn in range(TURNS):
            _go_on(script, turn)
            prompts.append((after if turn >= CHANGE else before) + _rendered(script.messages))
        return self._turns(prompts, _asked_from_change(script))

    def summarized_history(self, number: int) -> tuple[AgentTurn, ...]:
        """A summary replaces the first three of six exchanges; the other three move to the front."""
        count = _HALF * _PAGES_AT_ONCE
        each = self._moved_tokens // count
        lengths = [int(each * _SHORTER)] * count + [each] * count
        script = self._script(number, lengths, kept_from=count)
        front = _system(_SUBJECTS[:2])
        read = ", ".join(result.fact.name for result in script.results[:count])
        summary = Message("summary", "user", f"Summary of what was said before: pages were read ({read}).")
        prompts = []
        kept_from = 0
        for turn in range(TURNS):
            if turn == _HALF:
                kept_from = len(script.messages)
            _go_on(script, turn, pages=_PAGES_AT_ONCE)
            said = [summary, *script.messages[kept_from:]] if turn >= CHANGE else script.messages
            prompts.append(front + _rendered(said))
        return self._turns(prompts, _asked_from_change(script))

    # --- how they are put together ---------------------------------------------------------------

    def _script(self, number: int, lengths: Sequence[int], *, kept_from: int) -> Script:
        """Tool results of these lengths, no two of which have text in common.

        The facts of those from `kept_from` on can be asked for.
        """
        random = Random(f"{self._seed}, {number}")
        longest = max(lengths)
        shelf = Shelf(self._tokenizer, longest, longest * 11 // 10, random.randrange(2**32))
        spare = 1 + _SPARE_TOKENS_PER_WORD * self._thought_words // longest
        pieces = shelf.take(len(lengths) + spare)
        texts = [self._cut(piece, length) for piece, length in zip(pieces, lengths, strict=False)]
        results = PromptWriter(self._tokenizer).documents(texts, random)
        facts = [result.fact for result in results[kept_from:]]
        words = " ".join(pieces[len(lengths) :]).split()
        return Script(results, random.sample(facts, len(facts)), iter(words), self._thought_words)

    def _cut(self, text: str, tokens: int) -> str:
        """The first `tokens` tokens of a text, to the end of a word."""
        ids = self._encode(text)
        return text if len(ids) <= tokens else str(self._tokenizer.decode(ids[:tokens])).rpartition(" ")[0]

    def _turns(
        self, prompts: Sequence[list[Part]], asked: dict[int, Sequence[Needle]]
    ) -> tuple[AgentTurn, ...]:
        """Prompts of parts as turns; `asked` are facts by turn, the first of which its prompt asks for."""
        turns = []
        before: dict[str, int] = {}
        for number, parts in enumerate(prompts):
            ids, starts, moved = self._joined(parts, before)
            facts = asked.get(number, ())
            others = facts if number == CHANGE else ()
            questions = tuple(Question(fact, self._joined(_asking(parts, fact))[0]) for fact in others)
            turns.append(AgentTurn(ids, moved, facts[0] if facts else None, questions))
            before = starts
        return tuple(turns)

    def _joined(
        self, parts: Sequence[Part], before: dict[str, int] | None = None
    ) -> tuple[np.ndarray, dict[str, int], np.ndarray]:
        """The ids `[tokens]` of parts in a row, where each begins, and positions `[n]` of those that moved.

        `before` says where parts began in the turn before.
        """
        ids: list[int] = []
        starts: dict[str, int] = {}
        moved: list[int] = []
        for name, text in parts:
            starts[name] = len(ids)
            ids += self._encode(text)
            if (before or {}).get(name, starts[name]) != starts[name]:
                moved += range(starts[name], len(ids))
        return np.asarray(ids, dtype=np.int64), starts, np.asarray(moved, dtype=np.int64)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


CASES: dict[str, Callable[[Stage, int], tuple[AgentTurn, ...]]] = {
    "thinking": Stage.stripped_thinking,
    "tools": Stage.changed_tools,
    "summary": Stage.summarized_history,
}


def _go_on(script: Script, turn: int, pages: int = 1) -> None:
    """What a turn adds: before the change pages are read, from then on facts are asked for."""
    if turn:
        script.say("assistant", f"That was step {turn}.")
    if turn >= CHANGE:
        script.say("user", script.facts[(turn - CHANGE) % len(script.facts)].question)
        return
    script.say("user", f"Please read what you need for step {turn + 1}.")
    for number in range(turn * pages, (turn + 1) * pages):
        script.look_up(number)


def _asked_from_change(script: Script) -> dict[int, Sequence[Needle]]:
    """The facts by turn, the one that is asked for first."""
    facts = list(script.facts)
    return {
        CHANGE + later: facts[later % len(facts) :] + facts[: later % len(facts)]
        for later in range(TURNS - CHANGE)
    }


def _last_question(script: Script) -> int:
    """The number of the last message of a user that is no tool's result."""
    return max(
        number
        for number, message in enumerate(script.messages)
        if message.role == "user" and not message.text.startswith("<tool_response>")
    )


def _system(subjects: Sequence[str]) -> list[Part]:
    """The system prompt with a tool for each subject."""
    tools = [(f"tool {subject}", _tool(subject)) for subject in subjects]
    return [("system", f"<|im_start|>system\n{_INSTRUCTION}"), *tools, ("system's end", "<|im_end|>\n")]


def _tool(subject: str) -> str:
    return (
        f'{{"name": "search_{subject}", "description": "Looks for {subject} in the archive and returns the '
        f'page that fits best.", "parameters": {{"words": "what to look for among the {subject}", "limit": '
        f'"how many {subject} to look at"}}}}\n'
    )


def _rendered(messages: Sequence[Message], since: int = 0) -> list[Part]:
    """Messages in a chat template, up to where the answer begins; no thinking before message `since`."""
    parts: list[Part] = []
    before = "system"
    for number, message in enumerate(messages):
        parts.append((f"behind {before}", f"<|im_start|>{message.role}\n"))
        if message.thinking and number >= since:
            parts.append((f"{message.name}, thinking", message.thinking))
        parts.append((message.name, f"{message.text}<|im_end|>\n"))
        before = message.name
    return [*parts, (f"behind {before}", "<|im_start|>assistant\n")]


def _asking(parts: Sequence[Part], fact: Needle) -> list[Part]:
    """A prompt of parts with a question for `fact` as its last message, and the first words of the answer.

    Behind thousands of tokens a small model often says something else; asked so, it looks for the value.
    """
    question = (parts[-2][0], f"{fact.question}<|im_end|>\n")
    return [*parts[:-2], question, parts[-1], (f"answer for {fact.name}", fact.lead)]
