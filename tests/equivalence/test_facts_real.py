"""Facts kept by approximate reuse on the built-in model: a sample in `make test`, all in `make proof`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvboost import KVBoost
from kvboost.cli.main import main
from kvboost.proof.documents import ALONE, TOGETHER, needle_cases
from kvboost.proof.needles import measure_facts
from kvboost.proof.quality import strategy_of

pytestmark = [pytest.mark.usefixtures("approximate_reuse"), pytest.mark.real_model]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_facts_of_a_few_questions(real: KVBoost) -> None:
    """All tokens computed again keep every fact; none of them, and some, are nearer the more there are."""
    strategies = {
        "nothing": strategy_of("nothing", 0.0),
        "guided": strategy_of("guided", 0.15),
        "all": strategy_of("all", 1.0),
    }
    cases = needle_cases(real.tokenizer, (3,), 500, seed=3)
    scores = measure_facts(real, strategies, cases, questions=3)
    assert scores.answered == 3
    for way in (ALONE, TOGETHER):
        assert scores.kept[way]["all"] == 3
        nothing, guided, complete = (sum(scores.errors[way][name]) for name in strategies)
        assert complete < 1e-4 < guided < nothing


@pytest.mark.slow
def test_facts_full() -> None:
    """The benchmark's own targets, on questions that the rule was not chosen with."""
    command = "bench quality --dtype bfloat16 --prompts 18 --prompt-tokens 1200 --facts 100 --json --out"
    outcome = CliRunner().invoke(main, [*command.split(), str(RESULTS)])
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout)
    facts = [target for target in record["targets"] if target["name"].startswith("facts kept")]
    assert len(facts) == 2
    assert record["facts"]["answered"] >= 100
    assert all(target["met"] for target in facts), facts
