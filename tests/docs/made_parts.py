"""Parts of pages that are made from result files: between two marks, so that they can be made again."""

from __future__ import annotations

_END = "<!-- end of what is made -->"


def with_part(page: str, module: str, made: str) -> str:
    """The page with `made` in place of what `module` of this package made before."""
    begin = f"<!-- made by tests/docs/{module}.py -->"
    before, rest = page.split(begin, 1)
    return f"{before}{begin}\n\n{made}\n\n{_END}{rest.split(_END, 1)[1]}"
