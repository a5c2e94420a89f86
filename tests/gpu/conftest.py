"""On a GPU no kernel may be given up in silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvboost.kernels import fallback


@pytest.fixture(autouse=True)
def no_kernel_is_given_up() -> Iterator[None]:
    yield
    assert not fallback._FAILED
