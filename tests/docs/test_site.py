"""The documentation holds together: links, pictures, options, navigation, and a site without warnings."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvboost
from kvboost.settings import EngineArguments, options_of
from tests.docs import option_tables

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [str(page.relative_to(DOCS)) for page in PAGES]
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def links_of(page: Path) -> Iterator[tuple[str, str]]:
    """Target and anchor of every link and image that stays inside the project."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if "://" not in link and not link.startswith("mailto:"):
            target, _, anchor = link.partition("#")
            yield target, anchor


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs both make them."""
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    plain = (re.sub(r"[^\w\- ]", "", head).strip().lower() for head in heads)
    return {re.sub(r"[ -]+", "-", head) for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_pictures_exist(page: Path) -> None:
    for target, anchor in links_of(page):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert path.is_relative_to(ROOT), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors_of(path), f"{target}#{anchor}"


def test_every_engine_option_is_explained_with_its_default() -> None:
    page = (DOCS / "options.md").read_text()
    assert option_tables.with_tables(page, option_tables.engine_table()) == page
    for name in (each.name for each in options_of(EngineArguments)):
        assert f"**`{name}`**" in page, f"{name} has no paragraph"


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "reference.md").read_text()
    for name in set(kvboost.__all__) - {"KVBoost", "__version__"}:
        assert re.search(rf"^::: kvboost\.[\w.]+\.{name}$", page, re.MULTILINE), name
    for path, name in re.findall(r"^::: ((?:\w+\.)+)(\w+)$", page, re.MULTILINE):
        assert hasattr(importlib.import_module(path.rstrip(".")), name), path + name


def test_the_navigation_lists_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"[\w/-]+\.md", nav)) == NAMES


def test_pictures_are_those_that_the_code_draws() -> None:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name, draw in pictures.PICTURES.items():
        assert (pictures.IMAGES / name).read_text(encoding="utf-8") == draw(), f"run docs/pictures.py: {name}"


def test_no_number_is_typed_into_pages_that_only_point_to_results() -> None:
    prose = re.sub(r"```.*?```", "", (DOCS / "performance.md").read_text(), flags=re.DOTALL)
    prose = re.sub(r"<!-- made by .*?<!-- end of what is made -->", "", prose, flags=re.DOTALL)
    prose = re.sub(r"^\|.*$", "", prose, flags=re.MULTILINE)  # tables are compared with the results elsewhere
    assert not re.findall(r"\d+(?:\.\d+)?\s?(?:ms|GB/s|x\b|%)", prose)


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    missing = [name for name in NEEDED if not found(name)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = built.stdout + built.stderr
    assert built.returncode == 0, said
    assert "WARNING" not in said
    assert "excluded from the built site" not in said
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(NAMES)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:[^\"\s>]+)", text)
        loaded += re.findall(r"<link[^>]*\shref=\"?(https?:[^\"\s>]+)", text)
        assert not loaded, page.name


def found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
