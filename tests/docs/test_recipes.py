"""Every Python block of the documentation runs, from top to bottom of its page, on one loaded model."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.disk import tiers
from tests.fixture_types import MakeEngine

DOCS = Path(__file__).parents[2] / "docs"
OPTIONAL = ("lm_eval", "langchain_core", "llama_index")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text())]


@pytest.fixture
def shared_model(page: Path, real: KVBoost, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`from_pretrained("builtin", ...)` gives an engine on the model that is loaded; all are closed.

    A page that writes to weights gets a model of its own.
    """
    opened: list[KVBoost] = []
    load: MakeEngine = KVBoost.from_pretrained
    writes = ".weight.data" in page.read_text()

    def open_on_shared(name: str = "", **options: Any) -> KVBoost:
        is_shared = name == "builtin" and not writes and not options.keys() & {"dtype", "device"}
        opened.append(KVBoost(real.model, real.tokenizer, **options) if is_shared else load(name, **options))
        return opened[-1]

    monkeypatch.setattr(KVBoost, "from_pretrained", open_on_shared)
    yield
    for engine in opened:
        engine.cache_manager.check_integrity()
        engine.close()


def run_page(page: Path) -> tuple[dict[str, Any], str]:
    """Run the blocks of a page in one scope; returns it, and what was printed."""
    text = page.read_text()
    scope: dict[str, Any] = {"__name__": "page"}
    printed = io.StringIO()
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        code = "\n" * line + block[1]  # so that errors name the page's own line
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec", dont_inherit=True), scope)
    return scope, printed.getvalue()


@pytest.mark.real_model
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(DOCS)) for page in PAGES])
@pytest.mark.usefixtures("shared_model", "approximate_reuse")
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = "\n".join(BLOCK.findall(page.read_text()))
    for module in OPTIONAL:
        if module in blocks and importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiers, "TIERS", dict(tiers.TIERS))  # a page may add one
    scope, printed = run_page(page)
    check = CHECKS.get(str(page.relative_to(DOCS)))
    if check is not None:
        check(scope, printed)


# What a page shows must be what it says.


def check_quick_start(scope: dict[str, Any], printed: str) -> None:
    assert scope["first"].cached_tokens == 0
    assert scope["second"].cached_tokens > scope["second"].prompt_tokens // 2
    assert "diverged at token" in printed


def check_options(_scope: dict[str, Any], printed: str) -> None:
    assert "bit_exact needs KV as it was computed" in printed


def check_chat(scope: dict[str, Any], _printed: str) -> None:
    new = scope["result"].prompt_tokens - scope["result"].cached_tokens
    assert 0 < new < 40  # the last question and the template around it
    assert scope["answer"].result.generated_tokens < 64


def check_rag(scope: dict[str, Any], printed: str) -> None:
    result, engine = scope["result"], scope["engine"]
    assert sum(span.length for span in result.spans) == result.prompt_tokens
    if engine.model.device.type == "cpu":  # on a GPU computing may be cheaper than repair
        assert result.cached_tokens > result.prompt_tokens // 2
        assert "approximate" in printed
        assert "recomputed" in printed
    assert all(span.origin.value in ("exact", "live") for span in scope["exact"].spans)


def check_retriever(scope: dict[str, Any], _printed: str) -> None:
    first, second = scope["results"]
    for result in (first, second):  # warmed before they were asked, so all but the question is found
        assert sum(span.length for span in result.spans if span.origin.value == "live") < 40
    if scope["engine"].model.device.type == "cpu":  # on a GPU computing may be cheaper than repair
        assert {span.origin.value for span in second.spans} >= {"exact", "approximate", "recomputed"}
    held = scope["engine"].warm_documents(scope["PAGES"][::-1], behind=scope["SYSTEM"])
    assert all(result.alignment_warning is None for result in held)


def check_evaluation(scope: dict[str, Any], _printed: str) -> None:
    assert all(score.log_likelihood < 0 for score in scope["scores"])
    assert all(result.cached_tokens > 0 for result in scope["results"])


def check_agents(scope: dict[str, Any], _printed: str) -> None:
    assert scope["step"].cached_tokens > scope["step"].prompt_tokens // 2
    assert len(scope["samples"]) == 3
    assert scope["prepared"].spans[0].origin.value == "exact"
    working, moved, settled = (scope[name] for name in ("working", "moved", "settled"))
    assert {span.origin.value for span in working.spans} == {"exact", "live"}
    if scope["engine"].model.device.type == "cpu":  # on a GPU computing may be cheaper than repair
        assert 0 < moved.recomputed_tokens < moved.cached_tokens // 2
        assert moved.cached_tokens > moved.prompt_tokens * 0.8
        assert settled.cached_tokens >= moved.prompt_tokens
        assert settled.recomputed_tokens == 0


def check_service(scope: dict[str, Any], _printed: str) -> None:
    assert scope["first"].cached_tokens > 0
    assert scope["again"].cached_tokens > scope["again"].prompt_tokens // 2
    assert scope["stats"]["disk"]["chunks"] > 0
    assert not scope["stats"]["disk"]["refused"]
    assert Path("kv-cache").is_dir()


def check_contributing(scope: dict[str, Any], printed: str) -> None:
    assert printed.startswith("True")
    assert scope["repaired"].cached_length == scope["assembled"].cached_length > 0
    assert scope["kept"].cached_tokens == scope["kept"].prompt_tokens - 1
    assert "'misses': {}, 'refused': {}" in printed


def check_your_questions(scope: dict[str, Any], printed: str) -> None:
    assert [row.mode for row in scope["report"].rows] == ["baseline", "prefix_cache", "chunk_kv_reuse"]
    assert scope["report"].row("prefix_cache").lost == ()
    assert "1 question over 2 documents" in printed


def check_limits(_scope: dict[str, Any], printed: str) -> None:
    assert "LlamaForCausalLM" in printed
    assert "the prompt is empty" in printed


CHECKS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "quick-start.md": check_quick_start,
    "options.md": check_options,
    "limits.md": check_limits,
    "your-questions.md": check_your_questions,
    "contributing.md": check_contributing,
    "recipes/chat.md": check_chat,
    "recipes/rag.md": check_rag,
    "recipes/langchain.md": check_retriever,
    "recipes/llamaindex.md": check_retriever,
    "recipes/evaluation.md": check_evaluation,
    "recipes/agents.md": check_agents,
    "recipes/service.md": check_service,
}


def test_the_checks_belong_to_pages_with_code() -> None:
    assert CHECKS.keys() <= {str(page.relative_to(DOCS)) for page in PAGES}
