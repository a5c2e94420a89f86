"""docs/architecture.md names every file that a request passes on its way to the first token."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests import ways
from tests.threads import one_torch_thread

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
PART = PAGE.partition("\n## Where a request goes, file by file\n")[2].partition("\n## ")[0]
TRANSFORMERS = pytest.importorskip("transformers").__version__

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("fastapi") is None, reason="the table has a served request too"
    ),
    pytest.mark.skipif(TRANSFORMERS.startswith("4."), reason="recorded with transformers 5"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, ways.Way]:
    with one_torch_thread():
        return {"generate": ways.warm_generate(), "RAG": ways.rag_generate(), "served": ways.served()}


def test_the_page_names_every_file(found: dict[str, ways.Way]) -> None:
    """If it does not: `python -m tests.ways` prints the table for the page."""
    assert ways.table(found) in PART


def test_the_main_road_is_on_the_way(found: dict[str, ways.Way]) -> None:
    road = re.findall(r"`([\w/]+)`", PART.partition("twelve files:")[2].partition(". The others")[0])
    assert len(road) == 12
    assert set(road) <= set(found["generate"].files)


def test_a_way_ends_at_the_first_token(found: dict[str, ways.Way]) -> None:
    for way in found.values():
        assert not any(file.startswith(("kv/", "kernels/")) for file in way.files)
        assert not {"reuse/recorder", "reuse/chunk_writer"} & set(way.files)  # storing comes afterwards
        assert all(hop.source != hop.target for hop in way.hops)
