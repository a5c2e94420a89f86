"""Kernels that may not be made everywhere: one that fails is not tried again, and there is another way."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

_log = logging.getLogger(__name__)
_FAILED: set[str] = set()  # names of kernels, in this process


def launched(name: str, launch: Callable[[], None]) -> bool:
    """Whether a kernel was launched; False where it cannot be made here: the caller goes the other way."""
    if name in _FAILED:
        return False
    try:
        launch()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler, or of a GPU that lacks something
        _FAILED.add(name)
        _log.warning("the kernel for %s cannot be used here, which costs time: %s", name, error)
        return False
    return True
