"""Draws the pictures of how reuse works: `python docs/pictures.py` writes docs/images/*.svg.

Each has a background of its own, so it can be read on light and dark pages, and says in words what its
colours mean. A test compares the files with what is drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from kvboost.html_view import COLOURS

IMAGES = Path(__file__).parent / "images"
STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de; }
    .ink { fill: #1f2328; font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
    .small { font-size: 12px; }
    .head { font-weight: 600; }
    .line { stroke: #57606a; stroke-width: 1.5; fill: none; }
    .tip { fill: #57606a; }
    .plain { fill: #f0f2f4; stroke: #8a8f98; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #1c2128; stroke: #444c56; }
      .ink { fill: #dfe5ec; }
      .line { stroke: #adbac7; }
      .tip { fill: #adbac7; }
      .plain { fill: #2d333b; }
    }
"""


class Picture:
    """A growing SVG."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">\n  <title>{escape(title)}</title>\n  <style>{STYLE}  </style>'
        )
        self._parts: list[str] = []
        self._add(f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>')

    def _add(self, part: str) -> None:
        self._parts.append(f"  {part}")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        names = f"ink {kind}".strip()
        self._add(f'<text class="{names}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, words: str = "", origin: str = "") -> None:
        """A box in the colour of an origin, or a plain one."""
        colour = COLOURS.get(origin)
        look = f'fill="{colour}" fill-opacity="0.35" stroke="{colour}"' if colour else 'class="plain"'
        self._add(f'<rect {look} x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, anchor="middle")

    def line(self, path: str) -> None:
        self._add(f'<path class="line" d="{path}"/>')

    def arrow(self, path: str, x: float, y: float, *, down: bool) -> None:
        """A line that ends at (x, y) with a tip."""
        self.line(f"{path} {x:g} {y - 7:g}" if down else f"{path} {x - 7:g} {y:g}")
        self._add(f'<path class="tip" d="M{x:g} {y:g} {"l-5 -9 h10" if down else "l-9 -5 v10"} z"/>')

    def legend(self, x: float, y: float, meanings: Sequence[tuple[str, str, float]]) -> None:
        """What the colours mean, one behind the other: (origin, words, room for them)."""
        for origin, words, room in meanings:
            self.box(x, y - 11, 14, 14, origin=origin)
            self.text(x + 21, y, words, "small")
            x += room

    def svg(self) -> str:
        return "\n".join([self._head, *self._parts, "</svg>", ""])


def prefix_tree() -> str:
    """Stored chunks as a tree, and a new prompt that follows it."""
    picture = Picture(760, 306, "A prompt is followed through a tree of stored chunks")
    picture.text(24, 32, "Stored: a tree. A chunk was computed behind all the chunks to its left.", "head")
    picture.box(24, 80, 120, 34, "rules, part 1")
    picture.box(164, 80, 120, 34, "rules, part 2")
    picture.line("M144 97 H164")
    for y, name in ((52, "a chat"), (108, "handbook")):
        picture.line(f"M284 97 H304 V{y + 17} H324")
        picture.box(324, y, 130, 34, f"{name}, part 1")
        picture.line(f"M454 {y + 17} H474")
        picture.box(474, y, 130, 34, f"{name}, part 2")
    picture.text(24, 184, "A new prompt: found chunk by chunk, then token by token", "head")
    picture.box(24, 204, 120, 34, "rules, part 1", "exact")
    picture.box(164, 204, 120, 34, "rules, part 2", "exact")
    picture.box(324, 204, 130, 34, "handbook, part 1", "exact")
    picture.line("M144 221 H164 M284 221 H324 M454 221 H474")
    picture.box(474, 204, 62, 34, "part 2", "exact")
    picture.box(536, 204, 200, 34, "a question", "live")
    picture.text(536, 256, "it leaves the stored text here, inside a chunk", "small", "middle")
    picture.legend(24, 286, [("exact", "exact: copied into place", 190), ("live", "live: computed now", 0)])
    return picture.svg()


def moved_text() -> str:
    """Two documents that come back in another order."""
    picture = Picture(760, 330, "Known documents in another order are moved and repaired")
    picture.text(24, 32, "Read before", "head")
    picture.box(24, 46, 100, 34, "question 1")
    picture.box(124, 46, 230, 34, "document A")
    picture.box(354, 46, 170, 34, "document B")
    picture.arrow("M239 80 C239 120, 411 100,", 411, 154, down=True)
    picture.arrow("M439 80 C439 120, 211 100,", 211, 154, down=True)
    picture.text(440, 122, "keys are turned to their new positions", "small")
    picture.text(24, 140, "Asked now", "head")
    picture.text(24, 222, "What goes through the model, in one pass", "head")
    again = {126: (0, 24, 144), 296: (0, 40, 176, 204)}  # by the place of the document: tokens chosen
    for y, with_words in ((154, True), (236, False)):
        picture.box(24, y, 102, 34, "question 2" if with_words else "", "live")
        if with_words:
            picture.box(126, y, 170, 34, "document B", "approximate")
            picture.box(296, y, 230, 34, "document A", "approximate")
        for start, marks in again.items():
            for mark in marks:
                picture.box(start + mark, y, 9 if mark else 14, 34, origin="recomputed")
        picture.box(526, y, 130, 34, "the last words" if with_words else "", "live")
    meanings = [
        ("approximate", "approximate: moved as it is", 210),
        ("recomputed", "recomputed: moved, then computed again", 300),
        ("live", "live: computed now", 0),
    ]
    picture.legend(24, 308, meanings)
    return picture.svg()


def origins() -> str:
    """Every token of a prompt has one origin."""
    picture = Picture(760, 196, "Every token of a prompt has one origin")
    picture.text(24, 32, "One prompt, token by token: result.spans", "head")
    tokens = ["exact"] * 14 + ["live"] * 3 + ["recomputed"] * 2 + ["approximate"] * 7 + ["recomputed"]
    tokens += ["approximate"] * 6 + ["live"] * 6
    size = 18
    for number, origin in enumerate(tokens):
        picture.box(24 + number * size, 50, size - 2, 30, origin=origin)
    for first, last, words in (
        (0, 14, "rules, as always"),
        (14, 17, "new"),
        (17, 33, "a document, read before elsewhere"),
        (33, 39, "the question"),
    ):
        left, right = 24 + first * size, 24 + last * size - 2
        picture.line(f"M{left + 1} 88 V94 H{right - 1} V88")
        picture.text((left + right) / 2, 112, words, "small", "middle")
    picture.legend(24, 146, [("exact", "exact: same beginning, nothing to repair", 340)])
    picture.legend(24, 172, [("live", "live: not found, with the reason", 340)])
    picture.legend(364, 146, [("approximate", "approximate: same text, other surroundings", 0)])
    picture.legend(364, 172, [("recomputed", "recomputed: approximate, computed again", 0)])
    return picture.svg()


def request() -> str:
    """The path of a request, and where the first token comes."""
    picture = Picture(760, 178, "The path of a request")
    steps = [
        ("read", "tokens"),
        ("match", "what is known"),
        ("place", "copy, turn keys"),
        ("repair", "moved text only"),
        ("decode", "transformers"),
        ("store", "prompt, answer"),
    ]
    picture.text(24, 32, "The path of a request", "head")
    for number, (name, what) in enumerate(steps):
        x = 24 + number * 121
        picture.box(x, 50, 100, 34, name)
        picture.text(x + 50, 102, what, "small", "middle")
        if number:
            picture.arrow(f"M{x - 21} 67 L", x, 67, down=False)
    picture.line("M24 124 V132 H558 V124")
    picture.text(291, 152, "all of it up to the first token is inside ttft_ms", "small", "middle")
    picture.line("M629 124 V132 H729 V124")
    picture.text(679, 152, "after the first token", "small", "middle")
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "prefix-tree.svg": prefix_tree,
    "moved-text.svg": moved_text,
    "origins.svg": origins,
    "request.svg": request,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
