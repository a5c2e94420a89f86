"""Questions over several documents, as token ids: what is asked, and how the documents were read before.

Documents are pieces of Python's own language reference with a made-up fact in each; a question
asks for the fact of one of them. The same seed gives the same prompts. Knows a tokenizer, no
model and no engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from kvboost.errors import InvalidRequestError
from kvboost.proof.facts import Needle, draw_facts, draw_needles

Span = tuple[int, int]  # half-open
Draw = Callable[[int, Random], Sequence[Needle]]
# How documents were read before: each by itself, each behind other text, or by `warm_documents`.
ALONE, BEHIND, TOGETHER = "alone", "behind", "together"
INSTRUCTION = "Answer the question with the help of the documents."
_BODY = "\u2063documents\u2063"  # stands for the documents while a template is rendered
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])")
_TABLE_MARKS = "+|"  # a table drawn with these is no English


@dataclass(frozen=True)
class Document:
    """A text with a fact in it, and its ids when it is encoded by itself."""

    text: str
    fact: Needle
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DocumentPrompt:
    """Several documents and a question, as `token_ids` `[tokens]`.

    `spans` say where each document's ids stand; `content` is all of it as a user's message.
    """

    documents: tuple[Document, ...]
    asked: Needle
    content: str
    token_ids: np.ndarray
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Group:
    """Prompts of one kind: how many documents of how many tokens, cached alone or behind other text."""

    way: str
    documents: int
    tokens_each: Span

    @property
    def name(self) -> str:
        return f"{self.way}-{self.documents}"


@dataclass(frozen=True)
class Case:
    """A prompt, and the texts (ids) that were read before it came, in one of the ways."""

    group: str
    prompt: DocumentPrompt
    read_before: tuple[list[int], ...]
    way: str = ALONE


def groups_of(
    counts: Sequence[int], prompt_tokens: int, ways: Sequence[str] = (ALONE, BEHIND)
) -> tuple[Group, ...]:
    """All ways for every number of documents, with prompts of about `prompt_tokens`."""
    return tuple(
        Group(way, count, _tokens_each(count, prompt_tokens))
        for way in ways
        for count in dict.fromkeys(counts)
    )


def _tokens_each(count: int, prompt_tokens: int) -> Span:
    """The shortest and the longest of `count` documents."""
    return prompt_tokens * 3 // (4 * count), prompt_tokens * 5 // (4 * count)


def make_cases(tokenizer: Any, groups: Sequence[Group], count: int, seed: int) -> Iterator[Case]:
    """`count` cases, the groups taking turns. Texts of one case have nothing in common."""
    random = Random(seed)
    writer = PromptWriter(tokenizer)
    lengths = dict.fromkeys(group.tokens_each for group in groups)
    shelves = {span: Shelf(tokenizer, *span, random.randrange(2**32)) for span in lengths}
    for number in range(count):
        group = groups[number % len(groups)]
        yield _make_case(writer, shelves[group.tokens_each], group, random)


def _make_case(writer: PromptWriter, shelf: Shelf, group: Group, random: Random) -> Case:
    """Other text before a document: at least 256 tokens where it is cached behind some."""
    fillers = -(-256 // group.tokens_each[0]) if group.way == BEHIND else 0
    pieces = shelf.take(group.documents * (1 + fillers))
    documents = writer.documents(pieces[: group.documents], random)
    read_before = []
    for number, document in enumerate(documents):
        before = pieces[group.documents + number * fillers :][:fillers]
        as_read = writer.read_by_itself(document, behind=before)
        read_before.append(list(document.token_ids) if group.way == TOGETHER else as_read)
    random.shuffle(documents)
    prompt = writer.prompt(documents, random.choice(documents).fact)
    random.shuffle(read_before)
    return Case(group.name, prompt, tuple(read_before), group.way)


def needle_cases(
    tokenizer: Any, counts: Sequence[int], prompt_tokens: int, seed: int
) -> Iterator[tuple[Case, ...]]:
    """Questions for numbers, names and dates, without end: each as a case read alone and one read together.

    Prompts have one of `counts` documents, at random, and about `prompt_tokens` tokens.
    """
    random = Random(seed)
    writer = PromptWriter(tokenizer)
    spans = {count: _tokens_each(count, prompt_tokens) for count in counts}
    shelves = {count: Shelf(tokenizer, *span, random.randrange(2**32)) for count, span in spans.items()}
    while True:
        count = random.choice(list(shelves))
        documents = writer.documents(shelves[count].take(count), random, draw_needles)
        alone = tuple(writer.read_by_itself(document) for document in documents)
        together = tuple(list(document.token_ids) for document in documents)
        random.shuffle(documents)
        prompt = writer.prompt(documents, random.choice(documents).fact)
        yield tuple(
            Case(f"{way}-{count}", prompt, read, way) for way, read in ((ALONE, alone), (TOGETHER, together))
        )


class Shelf:
    """Pieces of text of `low` to `high` tokens, cut at sentence ends, in random order.

    Paragraphs that the reference repeats are left out. When all pieces are taken, the text is cut
    anew at other places: pieces of one `take` never overlap.
    """

    def __init__(self, tokenizer: Any, low: int, high: int, seed: int) -> None:
        if not 0 < low <= high:
            raise InvalidRequestError(
                f"a document needs from 1 token to as many or more, got {low} to {high}"
            )
        self._low, self._high = low, high
        self._random = Random(seed)
        self._topics = [_counted(tokenizer, sentences) for sentences in _sentences_by_topic()]
        self._pieces: list[str] = []

    def take(self, count: int) -> list[str]:
        """`count` pieces that have nothing in common."""
        if len(self._pieces) < count:
            self._pieces = [piece for topic in self._topics for piece in self._cut(topic)]
            self._random.shuffle(self._pieces)
        if len(self._pieces) < count:
            raise InvalidRequestError(
                f"the benchmark's text has {len(self._pieces)} pieces of {self._low} to {self._high} tokens, "
                f"{count} were asked for; choose shorter or fewer documents"
            )
        return [self._pieces.pop() for _ in range(count)]

    def _cut(self, topic: list[tuple[str, int]]) -> Iterator[str]:
        """Whole sentences in a row until a random length in the range is reached.

        A sentence too long for what is left (a code listing, mostly) starts the next piece, or
        falls out where it is too long for any.
        """
        skipped = self._random.randrange(4)
        piece: list[str] = []
        tokens, wanted = 0, self._wanted()
        for sentence, length in topic[skipped:]:
            if tokens + length > self._high:
                if tokens >= self._low:
                    yield "".join(piece).strip()
                piece, tokens, wanted = [], 0, self._wanted()
            if length > self._high:
                continue
            piece.append(sentence)
            tokens += length
            if tokens >= wanted:
                yield "".join(piece).strip()
                piece, tokens, wanted = [], 0, self._wanted()

    def _wanted(self) -> int:
        return self._random.randint(self._low, self._high)


class PromptWriter:
    """Puts documents and a question into the model's chat template.

    Documents and what is between them are encoded one by one, so that a document has the same ids
    wherever it stands.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def documents(self, texts: Sequence[str], random: Random, draw: Draw = draw_facts) -> list[Document]:
        """`texts` with a fact each, at a random place between two sentences."""
        documents = []
        for text, fact in zip(texts, draw(len(texts), random), strict=True):
            with_fact = _put_in(fact.sentence, text, random)
            documents.append(Document(with_fact, fact, tuple(self._encode(with_fact))))
        return documents

    def prompt(self, documents: Sequence[Document], asked: Needle) -> DocumentPrompt:
        """The documents in the given order, then the question."""
        before, after = self._frame(asked.question)
        ids = self._start_ids + self._encode(before)
        spans = []
        for number, document in enumerate(documents, start=1):
            ids += self._encode(_header(number))
            spans.append((len(ids), len(ids) + len(document.token_ids)))
            ids += document.token_ids
        ids += self._encode(after)
        content = message(documents, asked.question)
        return DocumentPrompt(tuple(documents), asked, content, np.asarray(ids, dtype=np.int64), tuple(spans))

    def read_by_itself(self, document: Document, behind: Sequence[str] = ()) -> list[int]:
        """The ids of a document as it was read before: first of all, or behind other texts."""
        other = [self._encode(text + "\n\n") for text in behind]
        return [*self._start_ids, *(token for ids in other for token in ids), *document.token_ids]

    def _frame(self, question: str) -> tuple[str, str]:
        """What stands before the first document's header and behind the last document."""
        content = f"{INSTRUCTION}{_BODY}\n\nQuestion: {question}"
        if getattr(self._tokenizer, "chat_template", None) is None:
            before, _, after = content.partition(_BODY)
            return before, f"{after}\nAnswer:"
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        before, _, after = str(rendered).partition(_BODY)
        return before, after

    @cached_property
    def _start_ids(self) -> list[int]:
        """What the tokenizer puts before every text; a chat template writes it out itself."""
        if getattr(self._tokenizer, "chat_template", None) is not None:
            return []
        with_specials = list(self._tokenizer("a", verbose=False)["input_ids"])
        return with_specials[: with_specials.index(self._encode("a")[0])]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def message(documents: Sequence[Document], question: str) -> str:
    """What a user writes: the instruction, the documents under their headers, the question."""
    body = "".join(_header(number) + document.text for number, document in enumerate(documents, start=1))
    return f"{INSTRUCTION}{body}\n\nQuestion: {question}"


def _header(number: int) -> str:
    return f"\n\nDocument {number}:\n"


def _put_in(sentence: str, text: str, random: Random) -> str:
    """`sentence` as one more sentence of `text`, anywhere but in front."""
    places = [found.start() for found in _SENTENCE_END.finditer(text)]
    at = random.choice([*places, len(text)])
    return f"{text[:at]} {sentence}{text[at:]}"


def plain_text() -> str:
    """English that every Python has: its own language reference."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    return "\n\n".join(topics[name] for name in sorted(topics))


def _sentences_by_topic() -> list[list[str]]:
    """Every topic's sentences with the space behind them, without tables and repeated paragraphs."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    seen: set[str] = set()
    by_topic = []
    for name in sorted(topics, key=lambda name: len(topics[name])):
        sentences: list[str] = []
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen and words[0] not in _TABLE_MARKS:
                seen.add(words)
                sentences += _split(paragraph.rstrip() + "\n\n")
        by_topic.append(sentences)
    return by_topic


def _split(paragraph: str) -> list[str]:
    ends = [found.end() for found in _SENTENCE_END.finditer(paragraph)]
    return [paragraph[start:end] for start, end in zip([0, *ends], [*ends, len(paragraph)], strict=True)]


def _counted(tokenizer: Any, sentences: list[str]) -> list[tuple[str, int]]:
    if not sentences:
        return []
    encoded = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
    return [(sentence, len(ids)) for sentence, ids in zip(sentences, encoded, strict=True)]
