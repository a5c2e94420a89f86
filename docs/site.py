"""Files outside docs/ that pages link to (results, tests, examples) become part of the built site.

In the repository such a link leads to the file. The site has no repository beside it, so every file that is
linked is copied to files/, and the link turned to it. Named in mkdocs.yml; knows nothing of kvboost.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)(?=[)#])")


def _outside(page: str, link: str) -> str | None:
    """Where in the repository a link of `page` leads, if that is a file outside docs/."""
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    is_file = "://" not in link and not target.startswith(("docs/", "..")) and (ROOT / target).is_file()
    return target if is_file else None


def _linked(files: Files) -> Iterator[str]:
    for page in files.documentation_pages():
        for _, link in LINK.findall(page.content_string):
            if (target := _outside(page.src_uri, link)) is not None:
                yield target


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked."""
    for target in sorted(set(_linked(files))):
        files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001  # by name
    """Turn the links."""
    here = posixpath.dirname(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        target = _outside(page.file.src_uri, link[2])
        return link[0] if target is None else link[1] + posixpath.relpath(f"files/{target}", here or ".")

    return LINK.sub(turned, markdown)
