"""Where chunks can be kept besides RAM: the option `disk_cache_dir` becomes a tier here.

A path is a folder; `NAME://PLACE` is the tier of that name in `TIERS`. Imports a tier only when it is opened.
Knows the settings and how large a record gets, and nothing of how a tier keeps it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from kvboost.disk import serde
from kvboost.disk.chunk_tier import ChunkTier, TierSpec
from kvboost.errors import InvalidRequestError
from kvboost.kv.codec import KVCodec
from kvboost.settings import EngineSettings

Opener = Callable[[str, TierSpec], ChunkTier]  # the text is the place: a path, or what follows `NAME://`
_SCHEME = re.compile(r"([a-z][a-z0-9+]+)://")  # at least two letters: C:// is a path


def _folder(place: str, wanted: TierSpec) -> ChunkTier:
    from kvboost.disk.folder import make_private_folder  # these need POSIX
    from kvboost.disk.room import Room
    from kvboost.disk.tier import DiskTier

    room = Room(make_private_folder(Path(place)), wanted.max_bytes)
    return DiskTier(
        room.folder_of(wanted.name),
        wanted.max_chunks,
        wanted.record_bytes,
        codec=wanted.codec,
        label=wanted.label,
        grows=True,
        room=room,
    )


TIERS: dict[str, Opener] = {
    "": _folder,  # any path
}


def open_tier(settings: EngineSettings, codec: KVCodec, family: str, label: str = "") -> ChunkTier:
    """The tier that `disk_cache_dir` names, for the chunks of one model, dtype, encoding and chunk size."""
    opener, place = _opener(os.fspath(settings.disk_cache_dir or ""))
    longest = settings.chunk_size + 2 * settings.chunk_boundary_window
    record_bytes = slot_bytes_for(codec, longest)
    budget = settings.disk_cache_bytes
    if budget is not None and budget < record_bytes:
        raise InvalidRequestError(
            f"disk_cache_bytes must be at least {record_bytes}, the bytes of one chunk of this model "
            f"({longest} tokens), got {budget}"
        )
    name = f"{family[:24]}-{settings.chunk_size}-{record_bytes}"
    return opener(place, TierSpec(name, codec, record_bytes, budget, label))


def slot_bytes_for(codec: KVCodec, tokens: int) -> int:
    """Room for a chunk of `tokens` tokens with its header."""
    header = 2_048 + 64 * len(codec.layout.layers) + 4 * tokens
    return serde.padded(header) + serde.padded(codec.bytes_for(tokens))


def _opener(given: str) -> tuple[Opener, str]:
    found = _SCHEME.match(given)
    scheme = found[1] if found else ""
    if scheme not in TIERS:
        known = " or ".join(["a folder", *(f"{name}://..." for name in TIERS if name)])
        raise InvalidRequestError(
            f"disk_cache_dir must be {known}, got {given!r} (write ./{given} for a folder of that name)"
        )
    return TIERS[scheme], given[found.end() :] if found else given
