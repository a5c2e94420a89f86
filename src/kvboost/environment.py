"""The one place where environment variables are read.

It knows names and folders, nothing of what is kept in them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Folder for what kvboost may rebuild at any time; `KVBOOST_CACHE_DIR` overrides it."""
    chosen = os.environ.get("KVBOOST_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvboost"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home()))) / "kvboost" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvboost"
