"""docs/architecture.md names the packages that there are, and modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvboost"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PART = PAGE.partition("\n## The packages\n")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PART.splitlines() if "|" in line][
    2:
]
LONGEST = 450
MEDIAN = 150
MOST_IN_ROOT = 14


def packages() -> set[str]:
    return {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def is_reexport(path: Path) -> bool:
    lines = [
        line for line in path.read_text().splitlines() if line and not line.startswith(("from", "import"))
    ]
    return len(lines) <= 8 and any(line.startswith("__all__") for line in lines)


def modules_of_the_root() -> list[str]:
    return sorted(path.stem for path in SOURCE.glob("*.py") if not is_reexport(path))


def test_every_package_is_listed_once() -> None:
    named = [name for row in ROWS for name in re.findall(r"`(\w+)/`", row[0])]
    assert sorted(named) == sorted(packages())


def test_the_modules_to_start_with_exist() -> None:
    for names, _, modules in ROWS:
        folders = re.findall(r"`(\w+)/`", names) or [""]
        for module in re.findall(r"`(\w+)/?`", modules):
            found = [SOURCE / folder / f"{module}.py" for folder in folders]
            found += [SOURCE / folder / module / "__init__.py" for folder in folders]
            assert any(path.is_file() for path in found), f"{names}: {module}"


def test_the_linter_has_a_layer_for_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = settings["contracts"]
    layers = [
        [name.strip().removeprefix("kvboost.") for name in layer.split("|")] for layer in contract["layers"]
    ]
    alone = [layer[0] for layer in layers if layer[0] in packages()]
    assert sorted(alone) == sorted(packages())
    assert all(len(layer) == 1 for layer in layers if layer[0] in packages())
    listed = {name for layer in layers for name in layer}
    assert set(modules_of_the_root()) - {"__init__"} <= listed


def test_modules_are_short() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {path: length for path, length in lengths.items() if length > LONGEST}
    assert sorted(lengths.values())[len(lengths) // 2] <= MEDIAN


def test_the_root_has_few_modules() -> None:
    assert len(modules_of_the_root()) <= MOST_IN_ROOT, modules_of_the_root()
