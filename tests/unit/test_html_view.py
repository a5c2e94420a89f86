"""Results in notebooks: well-formed, escaped, and complete."""

from __future__ import annotations

from xml.etree import ElementTree

from kvboost import html_view
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{text}</div>")


def test_a_bar_covers_the_prompt() -> None:
    spans = [
        (0, 30, "exact", ""),
        (30, 40, "recomputed", 'a "reason" <b>'),
        (40, 100, "live", "never stored"),
    ]
    root = parsed(html_view.origin_bar(spans, 100))
    widths = [part.attrib["style"].split(";")[0] for part in root[0]]
    assert widths == ["width:30.000%", "width:10.000%", "width:60.000%"]
    assert root[0][1].attrib["title"] == 'tokens 30 to 40: recomputed a "reason" <b>'
    legend = "".join(root[1].itertext())
    for words in ("exact 30", "recomputed 10", "live 60"):
        assert words in legend
    assert "approximate" not in legend


def test_results_explanations_and_reports(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(50, 1)
    engine.warm(prompt[:40])
    result = engine.generate(prompt, 4)
    shown = "".join(parsed(result._repr_html_()).itertext())
    assert "40 of 50 prompt tokens from the cache" in shown
    explained = parsed(engine.explain(prompt)._repr_html_())
    assert len(explained.findall(".//tbody/tr")) == len(engine.explain(prompt).spans)
    report = engine.verify_correctness([prompt], 3)
    assert len(parsed(report._repr_html_()).findall(".//tbody/tr")) == len(report.checks) + 3
