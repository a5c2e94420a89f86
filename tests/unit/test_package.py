"""What belongs to the package beside its modules."""

from __future__ import annotations

from importlib.resources import files

import pytest


@pytest.mark.parametrize("name", ["py.typed", "server/page/index.html"])
def test_data_files_are_in_the_package(name: str) -> None:
    assert files("kvboost").joinpath(name).is_file()
