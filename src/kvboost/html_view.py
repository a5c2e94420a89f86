"""Results as small pieces of HTML, for notebooks. Knows origins by name only."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

# Told apart by people who do not see colours, too: the legend has the shares in words.
COLOURS = {"exact": "#2a9d8f", "approximate": "#e9a23b", "recomputed": "#c2504a", "live": "#8a8f98"}
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
Stretch = tuple[int, int, str, str]  # start, end, origin, why


def origin_bar(spans: Sequence[Stretch], total: int) -> str:
    """A bar over the prompt, coloured by origin, with the reasons on hover, and a legend."""
    parts = "".join(
        f'<div style="width:{100 * (end - start) / total:.3f}%;background:{COLOURS[origin]}" '
        f'title="{_escaped(f"tokens {start} to {end}: {origin} {why}".strip())}"></div>'
        for start, end, origin, why in spans
    )
    shares = {name: sum(end - start for start, end, origin, _ in spans if origin == name) for name in COLOURS}
    legend = " ".join(
        f'<span style="margin-right:1em"><span style="color:{COLOURS[name]}">&#9632;</span> '
        f"{name} {count:,}</span>"
        for name, count in shares.items()
        if count
    )
    return (
        '<div style="display:flex;height:14px;max-width:640px;border-radius:3px;overflow:hidden">'
        f"{parts}</div>"
        f'<div style="font-size:90%;margin-top:4px">{legend}</div>'
    )


def paragraph(text: str) -> str:
    """Text as it is, line breaks kept."""
    return f'<div style="white-space:pre-wrap;margin:4px 0">{_escaped(text)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain table."""
    cells = "".join(f"<th>{_escaped(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_escaped(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _escaped(text: str) -> str:
    """Safe inside tags and attributes; characters that no page may have are shown as such."""
    return html.escape(_FORBIDDEN.sub("\ufffd", text), quote=True)
