"""Which modules, parameters and buffers a model has, listed once for quick looks. Knows no values."""

from __future__ import annotations

import operator
import weakref
from itertools import chain

import torch

_values = operator.methodcaller("values")


class ModelStructure:
    """The modules of `model` as one list of their dictionaries, so that a look at all of them is quick.

    Tensors named in `volatile` are skipped: the model's own forward changes them.
    """

    def __init__(self, model: torch.nn.Module, volatile: frozenset[str]) -> None:
        named = list(model.named_modules())
        self.names = [name or type(model).__name__ for name, _ in named]
        self.dicts = [module.__dict__ for _, module in named]
        self.kinds = [type(module) for _, module in named]
        self.classes = tuple(
            f"{name}: {kind.__module__}.{kind.__qualname__}"
            for (name, _), kind in zip(named, self.kinds, strict=True)
        )
        self._root = weakref.ref(model)
        # A module compiled by torch may lack a field: it passes on that of the module inside.
        self.flagged = [
            (name, each) for name, each in zip(self.names, self.dicts, strict=True) if "training" in each
        ]
        self.flags = [each for _, each in self.flagged]
        self.hooked = [
            (name, each)
            for name, each in zip(self.names, self.dicts, strict=True)
            if "_forward_hooks" in each
        ]
        self.hooks = [each for _, each in self.hooked]
        self.children = [each["_modules"] for each in self.dicts if each["_modules"]]
        self._empty = [
            each[kind]
            for each in self.dicts
            for kind in ("_modules", "_parameters", "_buffers")
            if not each[kind]
        ]
        self.modules = tuple(chain.from_iterable(map(_values, self.children)))
        self._child_kinds = list(map(type, self.modules))
        self.adapters = [each for each in self.dicts if "merged_adapters" in each]
        self.tensor_dicts: list[dict[str, torch.Tensor | None]] = []
        self.tensor_names: list[str] = []
        self.skipped: set[int] = set()  # numbers of tensors that the model's own forward changes
        for name, module in named:
            for kind in ("_parameters", "_buffers"):
                found = module.__dict__[kind]
                if not found:
                    continue
                self.tensor_dicts.append(found)
                for key in found:
                    full = f"{name}.{key}" if name else key
                    if full in volatile or _changes_with_length(module, key):
                        self.skipped.add(len(self.tensor_names))
                    self.tensor_names.append(full)

    def is_current(self) -> bool:
        """Whether the model still has the same modules, of the same classes, with as many tensors."""
        modules = tuple(chain.from_iterable(map(_values, self.children)))
        if modules != self.modules or any(self._empty) or type(self._root()) is not self.kinds[0]:
            return False
        has_classes = list(map(type, modules)) == self._child_kinds
        return has_classes and sum(map(len, self.tensor_dicts)) == len(self.tensor_names)

    def present(self) -> list[torch.Tensor | None]:
        """Parameters and buffers as they are now, in the order of `tensor_names`."""
        return list(chain.from_iterable(map(_values, self.tensor_dicts)))


def _changes_with_length(module: torch.nn.Module, name: str) -> bool:
    """Whether it holds rope frequencies that the model's own forward sets by the length of its input."""
    kind = str(getattr(module, "rope_type", ""))
    return name.endswith("inv_freq") and not name.startswith("original") and kind in ("dynamic", "longrope")
