"""Made-up facts for documents: numbers, names and dates that only one document says.

A fact has a sentence that goes into its document, and a question that asks for its value. The same random
numbers give the same facts. Knows no tokenizer and no documents.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from kvboost.errors import InvalidRequestError

_NAMES = ("Heron", "Falcon", "Osprey", "Plover", "Curlew", "Magpie", "Kestrel", "Pelican", "Raven", "Puffin")
_PLACES = ("archive", "harbour", "library", "station", "tower", "garden", "museum", "depot", "mill", "farm")
_KINDS = (
    "access code",
    "telephone extension",
    "licence number",
    "opening year",
    "parcel number",
    "height in millimetres",
    "insurance number",
    "daily number of visitors",
    "price in dollars",
    "weight in kilograms",
)
_FIRST_NAMES = ("Marta", "Oskar", "Ines", "Tomasz", "Yara", "Piet", "Noor", "Elena", "Hugo", "Aiko", "Bruno")
_LAST_NAMES = (
    "Lindqvist",
    "Bremer",
    "Caldeira",
    "Wolski",
    "Haddad",
    "Janssen",
    "Rahman",
    "Petrova",
    "Keller",
)
_ROLES = ("keeper", "owner", "architect", "director", "founder")
_EVENTS = ("opened", "closed", "sold", "painted", "inspected")
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)


class Needle(ABC):
    """Something that only its document says, about the place `name`."""

    name: str

    @property
    @abstractmethod
    def lead(self) -> str:
        """The sentence up to the value."""

    @property
    @abstractmethod
    def sentence(self) -> str:
        """What stands in the document."""

    @property
    @abstractmethod
    def question(self) -> str:
        """What asks for its value."""

    @abstractmethod
    def is_in(self, answer: str) -> bool:
        """Whether `answer` gives the value."""


@dataclass(frozen=True)
class Fact(Needle):
    """A number."""

    kind: str
    name: str
    number: int

    @property
    def lead(self) -> str:
        return f"The {self.kind} of the {self.name} is"

    @property
    def sentence(self) -> str:
        return f"{self.lead} {self.number}."

    @property
    def question(self) -> str:
        return f"What is the {self.kind} of the {self.name}?"

    def is_in(self, answer: str) -> bool:
        """However its digits are grouped."""
        digits = re.sub(r"(?<=\d)[ ,.](?=\d{3}\b)", "", answer)
        return re.search(rf"(?<!\d){self.number}(?!\d)", digits) is not None


@dataclass(frozen=True)
class PersonFact(Needle):
    """Somebody's name."""

    role: str
    name: str
    person: str

    @property
    def lead(self) -> str:
        return f"The {self.role} of the {self.name} is"

    @property
    def sentence(self) -> str:
        return f"{self.lead} {self.person}."

    @property
    def question(self) -> str:
        return f"Who is the {self.role} of the {self.name}?"

    def is_in(self, answer: str) -> bool:
        """First and last name, in a row."""
        return re.search(rf"\b{re.escape(self.person)}\b", answer, re.IGNORECASE) is not None


@dataclass(frozen=True)
class DateFact(Needle):
    """A day."""

    event: str
    name: str
    day: int
    month: str
    year: int

    @property
    def lead(self) -> str:
        return f"The {self.name} was {self.event} on"

    @property
    def sentence(self) -> str:
        return f"{self.lead} {self.day} {self.month} {self.year}."

    @property
    def question(self) -> str:
        return f"When was the {self.name} {self.event}?"

    def is_in(self, answer: str) -> bool:
        """Day, month and year, the day before the month or behind it."""
        day = rf"{self.day}(?:st|nd|rd|th)?"
        orders = (rf"{day} (?:of )?{self.month},? {self.year}", rf"{self.month} {day},? {self.year}")
        return any(re.search(rf"(?<!\d){order}(?!\d)", answer, re.IGNORECASE) for order in orders)


def draw_facts(count: int, random: Random) -> list[Fact]:
    """`count` numbers of different places, and of different kinds as far as there are any."""
    kinds = random.sample(_KINDS, len(_KINDS))
    numbers = random.sample(range(1_000, 10_000), min(count, 9_000))
    return [
        Fact(kinds[index % len(kinds)], name, numbers[index])
        for index, name in enumerate(_draw_names(count, random))
    ]


def draw_needles(count: int, random: Random) -> list[Needle]:
    """`count` facts about different places: numbers, names and dates at random."""
    people = [f"{first} {last}" for first in _FIRST_NAMES for last in _LAST_NAMES]
    numbers, persons = draw_facts(count, random), random.sample(people, len(people))
    found: list[Needle] = []
    for number, person in zip(numbers, persons, strict=False):
        day, month, year = random.randint(1, 28), random.choice(_MONTHS), random.randint(1_800, 2_020)
        kinds: list[Needle] = [
            number,
            PersonFact(random.choice(_ROLES), number.name, person),
            DateFact(random.choice(_EVENTS), number.name, day, month, year),
        ]
        found.append(random.choice(kinds))
    return found


def _draw_names(count: int, random: Random) -> list[str]:
    names = [f"{name} {place}" for name in _NAMES for place in _PLACES]
    if count > len(names):
        raise InvalidRequestError(f"there are {len(names)} made-up facts, {count} were asked for")
    return random.sample(names, count)
