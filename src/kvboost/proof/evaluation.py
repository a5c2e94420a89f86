"""A user's own questions, asked in every mode and at several ratios, over documents that were read before.

Contestants take turns within each question. Before every answer the cache holds the documents of the
question and nothing else, so that each finds the same. All of it runs on an engine of its own: the user's
cache is left alone. Knows the engine as far as `Answers` says; what it amounts to is `evaluation_report`'s.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from kvboost.errors import InvalidRequestError
from kvboost.models import GenerationResult, ScoreResult, content_hash_from_tokens
from kvboost.proof.answer_log import AnswerLog, LoggedAnswer, opened_log
from kvboost.proof.evaluation_report import EvaluationReport, report_of
from kvboost.proof.evaluation_rows import Contestant
from kvboost.proof.evaluation_settings import RATIOS, READ, EvaluationSettings
from kvboost.proof.fresh_engine import Verifiable, fresh_engine
from kvboost.proof.questions import Question, Source, read_questions
from kvboost.requests.prompts import Prompt

Report = Callable[[int, int, str], None]  # answers that are there, all answers, what is being done


class Answers(Verifiable, Protocol):
    """An engine, as far as questions need one."""

    cache_manager: Any

    def score(
        self, prompts: Sequence[Prompt], continuations: Sequence[Prompt], **options: Any
    ) -> list[ScoreResult]:
        """How likely each continuation is."""


def evaluate(
    engine: Any,
    source: Source,
    settings: EvaluationSettings,
    results: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> EvaluationReport:
    """Ask all questions that `results` has no answers to yet, and say what all of them amount to."""
    started = time.perf_counter()
    questions = read_questions(source)
    contestants, notes = _that_can(engine, settings)
    if notes:  # documents are read together for the sake of moved text
        settings = dataclasses.replace(settings, read=READ[0])
    with (
        fresh_engine(engine, recompute_ratio=RATIOS[0], max_kl=None, min_facts=None) as fresh,
        opened_log(None if results is None else Path(results)) as log,
        _bar(progress) as report,
    ):
        answers = _Asker(fresh, settings, contestants, log, report).ask_all(questions)
    return report_of(
        questions,
        contestants,
        answers,
        model=engine.core.parts.model_name,
        dtype=str(engine.model.dtype).removeprefix("torch."),
        read=settings.read,
        max_new_tokens=settings.max_new_tokens,
        notes=notes,
        seconds=time.perf_counter() - started,
    )


def _that_can(engine: Any, settings: EvaluationSettings) -> tuple[list[Contestant], tuple[str, ...]]:
    """The contestants that this model and engine allow, and why the others were left out."""
    asked = settings.contestants
    refusal = engine.core.parts.approximation.refusal(0, calibrating=True)
    if not refusal or all(each.ratio is None for each in asked):
        return asked, ()
    return [each for each in asked if each.ratio is None], (f"chunk_kv_reuse was left out: {refusal}",)


class _Asker:
    """Asks on an engine whose cache it may clear."""

    def __init__(
        self,
        engine: Answers,
        settings: EvaluationSettings,
        contestants: Sequence[Contestant],
        log: AnswerLog,
        report: Report,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._contestants = contestants
        self._log = log
        self._report = report
        self._is_chat = getattr(engine.tokenizer, "chat_template", None) is not None
        self._is_warm = False
        self._tokens: dict[str, str] = {}  # digests of the prompts, by the questions' ids
        options = {**engine.settings.engine_options, "recompute_ratio": None}  # contestants have their own
        versions = [version(name) for name in ("kvboost", "torch", "transformers")]
        asked = [settings.max_new_tokens, settings.read, engine.model.generation_config.to_dict()]
        parts = [versions, engine.namespace().family, options, asked]
        self._common = json.dumps(parts, sort_keys=True, default=str)

    def ask_all(self, questions: Sequence[Question]) -> dict[tuple[str, Contestant], LoggedAnswer]:
        """Every answer by the question's id and the contestant."""
        for question in questions:
            self._check_room(question)
        self._total = len(questions) * len(self._contestants)
        self._done = sum(len(self._contestants) - len(self._missing(question)) for question in questions)
        numbered = list(enumerate(questions))
        for order, group in groupby(numbered, key=lambda item: reading_order(item[1])):
            unanswered = [(number, question) for number, question in group if self._missing(question)]
            if unanswered:
                with self._documents_read(order):
                    for number, question in unanswered:
                        self._ask(number, question)
        self._report(self._total, self._total, "done")
        found = {
            (question.id, contestant): self._log.get(self._key(question, contestant))
            for question in questions
            for contestant in self._contestants
        }
        return {key: answer for key, answer in found.items() if answer is not None}

    def _missing(self, question: Question) -> list[Contestant]:
        return [each for each in self._contestants if self._log.get(self._key(question, each)) is None]

    def _key(self, question: Question, contestant: Contestant) -> str:
        """A digest of all that an answer depends on."""
        asked = [question.asked, self._tokens[question.id]]
        parts = json.dumps([self._common, asked, contestant.mode, contestant.ratio])
        return hashlib.sha256(parts.encode()).hexdigest()

    # --- one question ------------------------------------------------------------------------

    def _ask(self, number: int, question: Question) -> None:
        """Another contestant begins with every question."""
        first = number % len(self._contestants)
        missing = self._missing(question)
        if not self._is_warm:  # the first forwards of a process take longer than any later ones
            self._is_warm = True
            for contestant in (missing[0], missing[-1]):
                self._report(self._done, self._total, "warming up")
                self._generate(question, contestant, 1)
        for contestant in [*self._contestants[first:], *self._contestants[:first]]:
            if contestant in missing:
                self._report(self._done, self._total, f"question {question.id}, {contestant.name}")
                self._log.add(self._answered(question, contestant))
                self._done += 1

    def _answered(self, question: Question, contestant: Contestant) -> LoggedAnswer:
        result = self._generate(
            question, contestant, 1 if question.choices else self._settings.max_new_tokens
        )
        chosen = self._chosen(question, contestant) if question.choices else None
        return LoggedAnswer(
            key=self._key(question, contestant),
            id=question.id,
            mode=contestant.mode,
            ratio=contestant.ratio,
            answer=result.output_text if chosen is None else question.choices[chosen],
            chosen=chosen,
            ttft_ms=result.ttft_ms,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            recomputed_tokens=result.recomputed_tokens,
        )

    def _generate(self, question: Question, contestant: Contestant, new_tokens: int) -> GenerationResult:
        self._engine.clear()  # all but the documents, which are held
        return self._engine.generate(self._prompt(question), new_tokens, **contestant.options)

    def _chosen(self, question: Question, contestant: Contestant) -> int:
        """The choice whose tokens are the likeliest on average."""
        self._engine.clear()
        prompt, gap = self._prompt(question), "" if self._is_chat else " "
        continuations = [gap + text for text in question.choices]
        scores = self._engine.score(
            [prompt] * len(continuations), continuations, progress=False, **contestant.options
        )
        means = [score.log_likelihood / len(score.token_ids) for score in scores]
        return means.index(max(means))

    def _prompt(self, question: Question) -> Prompt:
        """The documents and the question, in the model's chat template if it has one."""
        documents = "\n\n".join(question.documents)
        if not self._is_chat:
            system = f"{question.system}\n\n" if question.system else ""
            return f"{system}{documents}\n\nQuestion: {question.question}\nAnswer:"
        messages = [{"role": "user", "content": f"{documents}\n\nQuestion: {question.question}"}]
        return [{"role": "system", "content": question.system}, *messages] if question.system else messages

    def _check_room(self, question: Question) -> None:
        """Refuse what the model cannot read, before anything is asked."""
        try:
            tokens = self._engine.tokenize(self._prompt(question))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"question {question.id}: {error}") from error
        self._tokens[question.id] = content_hash_from_tokens(tokens)
        needed, most = len(tokens) + self._settings.max_new_tokens, self._engine.max_positions
        if most is not None and needed > most:
            raise InvalidRequestError(
                f"question {question.id}: its prompt and max_new_tokens need {needed} positions, the model "
                f"has {most}; give it fewer or shorter documents"
            )

    # --- its documents -----------------------------------------------------------------------

    @contextmanager
    def _documents_read(self, texts: Sequence[str]) -> Iterator[None]:
        """Inside, the cache keeps `texts` whatever is cleared; afterwards it is empty."""
        engine = self._engine
        self._report(self._done, self._total, f"reading {len(texts)} documents")
        engine.clear()
        if self._settings.read == "together":
            read_together(engine, texts)
        else:
            for text in texts:
                engine.warm(text)
        with engine.cache_manager.exported(engine.namespace().family):
            yield
        engine.clear()


def reading_order(question: Question) -> tuple[str, ...]:
    """In which order the documents of a question are read: never in that of its prompt."""
    texts = sorted(set(question.documents), key=lambda text: hashlib.sha256(text.encode()).digest())
    if tuple(texts) == question.documents:
        texts = texts[1:] + texts[:1]
    return tuple(texts)


def read_together(engine: Any, texts: Sequence[str]) -> None:
    """Read documents behind each other, where the engine can."""
    warm_documents = getattr(engine, "warm_documents", None)
    if warm_documents is None:
        raise InvalidRequestError(
            'read="together" needs an engine with warm_documents, which this one has not; use read="alone"'
        )
    warm_documents(list(texts), progress=False)


@contextmanager
def _bar(progress: bool | None) -> Iterator[Report]:
    """A progress bar on stderr; by default only where someone watches."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda _done, _total, _what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
