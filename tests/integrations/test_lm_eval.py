"""The lm_eval adapter gives the scores and the answers of lm_eval's own Hugging Face model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.fixture_types import MakeEngine

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
pytest.importorskip("lm_eval", reason="needs lm_eval")

import datasets
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import StoppingCriteriaList

from benchmarks.suite import evaluation
from benchmarks.suite.commands import evaluation as bench_evaluation
from kvboost import KVBoost
from kvboost.errors import InvalidRequestError
from kvboost.integrations.lm_eval import KVBoostLM, StopText, evaluate, main
from tests.forwards import count_fed
from tests.texts import corpus
from tests.tiny_models import tiny_model

TOLERANCE = 1e-4
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


# --- tasks of our own ----------------------------------------------------------------------------


def sentences(count: int, seed: int) -> list[str]:
    """Lines of English of 20 to 60 characters."""
    lines = [line.strip() for line in corpus().splitlines()]
    return random.Random(seed).sample([line for line in lines if 20 <= len(line) <= 60], count)


def write_task(folder: Path, name: str, docs: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """A task file over JSON lines; the first five are the examples."""
    for split, part in (("validation", docs[:5]), ("test", docs[5:])):
        lines = "".join(json.dumps(doc) + "\n" for doc in part)
        (folder / f"{name}-{split}.jsonl").write_text(lines)
    files = {split: str(folder / f"{name}-{split}.jsonl") for split in ("validation", "test")}
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "datasets")},
        "test_split": "test",
        "fewshot_split": "validation",
        "fewshot_config": {"sampler": "first_n"},
        "metadata": {"version": 1},
        **config,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def write_choices(folder: Path, questions: int) -> str:
    """Multiple choice, choices of one to several tokens."""
    texts = sentences((questions + 5) * 5, seed=questions)
    draw = random.Random(1)
    docs = []
    for number in range(questions + 5):
        question, *choices = texts[5 * number : 5 * number + 5]
        choices = [choice[: draw.randint(1, 12)].strip() for choice in choices]
        docs.append({"question": question, "choices": choices, "answer": draw.randrange(4)})
    config = {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    write_task(folder, "local_choices", docs, config)
    return "local_choices"


def write_answers(folder: Path, **generation: Any) -> str:
    docs = [{"question": text, "answer": text[:4]} for text in sentences(11, seed=3)]
    config = {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n\n", "e"], "max_gen_toks": 12, "do_sample": False, **generation},
        "metric_list": [{"metric": "exact_match"}],
    }
    write_task(folder, "local_answers", docs, config)
    return "local_answers"


def write_texts(folder: Path) -> str:
    docs = [{"text": text * (1 + 9 * (number % 2))} for number, text in enumerate(sentences(9, seed=4))]
    config = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    }
    write_task(folder, "local_texts", docs, config)
    return "local_texts"


# --- the two models ------------------------------------------------------------------------------


def hugging_face(engine: KVBoost, **options: Any) -> HFLM:
    """lm_eval's own model over the same weights."""
    return HFLM(
        pretrained=engine.model, tokenizer=engine.tokenizer, **{"batch_size": 4, "device": "cpu", **options}
    )


def run(lm: Any, task: str, folder: Path, **options: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=lm, tasks=[task], task_manager=manager, bootstrap_iters=0, **options
    )
    assert results is not None
    return dict(results)


def compare(ours: dict[str, Any], theirs: dict[str, Any], task: str) -> None:
    """The same figures, and the same responses to every request."""
    numbers = {name: value for name, value in theirs["results"][task].items() if isinstance(value, float)}
    assert numbers
    assert {name: ours["results"][task][name] for name in numbers} == pytest.approx(
        numbers, rel=TOLERANCE, abs=TOLERANCE
    )
    samples = list(zip(ours["samples"][task], theirs["samples"][task], strict=True))
    assert samples
    for our, their in samples:
        assert our["arguments"] == their["arguments"]
        for (response,), (expected,) in zip(our["resps"], their["resps"], strict=True):
            if isinstance(expected, tuple):
                assert response[0] == pytest.approx(expected[0], abs=TOLERANCE)
                assert response[1] is expected[1]
            elif isinstance(expected, float):
                assert response == pytest.approx(expected, rel=1e-6, abs=TOLERANCE)  # of hundreds of tokens
            else:
                assert response == expected


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


# --- the same results ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_multiple_choice_equals_hugging_face(
    make_engine: MakeEngine, tmp_path: Path, architecture: str
) -> None:
    engine = make_engine(architecture)
    task = write_choices(tmp_path, 8)
    theirs = run(hugging_face(engine), task, tmp_path, num_fewshot=5)
    lm = KVBoostLM(engine)
    for cached_share in (0.7, 0.95):  # cold and warm
        before = lm.prompt_tokens, lm.cached_tokens
        compare(run(lm, task, tmp_path, num_fewshot=5), theirs, task)
        read, cached = lm.prompt_tokens - before[0], lm.cached_tokens - before[1]
        assert cached / read > cached_share
    assert len(theirs["samples"][task]) == 8


def test_single_token_choices_share_a_forward(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    pairs = [("One, two, three, f", letter) for letter in "abcd"]
    KVBoostLM(engine).loglikelihood(requests("loglikelihood", ("a", "b")), disable_tqdm=True)
    fed = count_fed(monkeypatch, engine.model)
    ours = KVBoostLM(engine).loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    monkeypatch.undo()
    assert sum(fed) == len(pairs[0][0])
    theirs = hugging_face(engine).loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=TOLERANCE)


@pytest.mark.parametrize(
    "generation", [{}, {"until": "s"}, {"until": [], "max_gen_toks": 5}, {"temperature": 0.7}]
)
def test_answers_equal_hugging_face(
    make_engine: MakeEngine, tmp_path: Path, generation: dict[str, Any]
) -> None:
    engine = make_engine()
    task = write_answers(tmp_path, **generation)
    theirs = run(hugging_face(engine), task, tmp_path, num_fewshot=2)
    compare(run(KVBoostLM(engine), task, tmp_path, num_fewshot=2), theirs, task)


def test_whole_texts_equal_hugging_face(make_engine: MakeEngine, tmp_path: Path) -> None:
    """With windows, too: some texts are longer than max_length."""
    engine = make_engine()
    task = write_texts(tmp_path)
    theirs = run(hugging_face(engine, max_length=64), task, tmp_path)
    compare(run(KVBoostLM(engine, max_length=64), task, tmp_path), theirs, task)


@pytest.mark.real_model
def test_the_built_in_model_equals_hugging_face(real: KVBoost, tmp_path: Path) -> None:
    task = write_choices(tmp_path, 3)
    theirs = run(hugging_face(real, batch_size=8), task, tmp_path, num_fewshot=5)
    compare(run(KVBoostLM(real), task, tmp_path, num_fewshot=5), theirs, task)


def test_a_chat_template_equals_hugging_face(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    task = write_choices(tmp_path, 3)
    options = {"num_fewshot": 2, "apply_chat_template": True, "system_instruction": "Be brief."}
    theirs = run(hugging_face(engine), task, tmp_path, **options)
    ours = run(KVBoostLM(engine), task, tmp_path, **options)
    assert "<|system|>Be brief.</s><|user|>" in json.dumps(ours["samples"])
    compare(ours, theirs, task)


# --- too long --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [16, 40])
def test_long_contexts_lose_their_beginning_as_with_hugging_face(
    make_engine: MakeEngine, max_length: int
) -> None:
    engine = make_engine()
    text = " ".join(sentences(3, seed=7))
    pairs = [
        (text[:size], text[size : size + more]) for size in (14, 15, 16, 39, 41, 90) for more in (1, 2, 9)
    ]
    ours = KVBoostLM(engine, max_length=max_length)
    theirs = hugging_face(engine, max_length=max_length, logits_cache=False)  # which mixes up other cuts
    for (value, greedy), (expected, is_greedy) in zip(
        ours.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True),
        theirs.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True),
        strict=True,
    ):
        assert value == pytest.approx(expected, abs=TOLERANCE)
        assert greedy is is_greedy
    prompts = [(text[:size], {"until": ["e"], "max_gen_toks": 6}) for size in (5, 11, 60)]
    single = hugging_face(engine, max_length=max_length, batch_size=1)
    assert ours.generate_until(requests("generate_until", *prompts), disable_tqdm=True) == (
        single.generate_until(requests("generate_until", *prompts), disable_tqdm=True)
    )


def test_all_positions_of_the_model_are_used(make_engine: MakeEngine) -> None:
    """The last token of a continuation is not read: one more than the model has positions fits."""
    engine = make_engine(model=tiny_model("llama", max_position_embeddings=48))
    text = " ".join(sentences(3, seed=8))
    pairs = [(text[:size], text[size:120]) for size in (100, 119)]
    ours, theirs = KVBoostLM(engine), hugging_face(engine, logits_cache=False)
    assert ours.max_length == theirs.max_length == 48
    for method, given in (("loglikelihood", pairs), ("loglikelihood_rolling", [(text,)])):
        found = getattr(ours, method)(requests(method, *given), disable_tqdm=True)
        expected = getattr(theirs, method)(requests(method, *given), disable_tqdm=True)
        assert torch.tensor(found) == pytest.approx(torch.tensor(expected), abs=10 * TOLERANCE)


# --- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("prefix_token_id", [None, 9])
def test_encoding_equals_hugging_face(
    make_engine: MakeEngine, add_bos_token: bool | None, prefix_token_id: int | None
) -> None:
    engine = make_engine()
    options = {"add_bos_token": add_bos_token, "prefix_token_id": prefix_token_id}
    ours, theirs = KVBoostLM(engine, **options), hugging_face(engine, **options)
    for name in ("eot_token_id", "prefix_token_id", "max_length", "max_gen_toks", "tokenizer_name"):
        assert getattr(ours, name) == getattr(theirs, name)
    for text in ("", "a text", "<s>a text", " a"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(
            text, add_special_tokens=False
        )
    assert ours.tok_encode("a text", left_truncate_len=3) == theirs.tok_encode("a text", left_truncate_len=3)
    pairs = [("", "b c"), ("", "<s>b"), ("a ", "b"), ("<s>a", " b")]
    found = ours.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    expected = theirs.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=TOLERANCE)


def test_chat_templates(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ours, theirs = KVBoostLM(engine), hugging_face(engine)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    for history, opens in ((messages[:1], True), (messages, False)):
        assert ours.apply_chat_template(history, opens) == theirs.apply_chat_template(history, opens)
    assert ours.chat_template(True) == theirs.chat_template(True) == engine.tokenizer.chat_template


def test_a_template_without_system_messages(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    strict = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    monkeypatch.setattr(engine.tokenizer, "chat_template", strict)
    lm = KVBoostLM(engine)
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
    assert lm.apply_chat_template([system, user]) == "U"
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ raise_exception('none') }}")
    with pytest.raises(InvalidRequestError, match="refused the messages: none"):
        lm.apply_chat_template([user])
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequestError, match="chat template"):
        lm.apply_chat_template([user])


# --- stop texts ------------------------------------------------------------------------------------


def test_a_stop_text_in_the_prompt_or_across_its_end_does_not_stop(tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    stop = StopText(tokenizer, ["ab"], [ids("xxab"), ids("xxa")])

    def ended(text: str) -> bool:
        return bool(StoppingCriteriaList([stop])(torch.tensor([ids(text)]), None).item())

    assert [ended(text) for text in ("xxab1", "xxab12")] == [False, False]
    assert [ended(text) for text in ("xxab12a", "xxab12ab")] == [False, True]
    assert [ended(text) for text in ("xxab", "xxabb")] == [False, False]  # "b" behind the prompt "xxa"
    assert not ended("something ab")  # a row that nobody has seen grow


def test_sampling_draws_as_hugging_face_does(make_engine: MakeEngine) -> None:
    engine = make_engine()
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5, "top_k": 20}
    asked = requests("generate_until", ("Question: why?\nAnswer:", options))
    answers = []
    for lm in (KVBoostLM(engine), hugging_face(engine, batch_size=1)):
        torch.manual_seed(5)
        answers.append(lm.generate_until(asked, disable_tqdm=True))
    assert answers[0] == answers[1]


def test_options_differ_between_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = requests(
        "generate_until",
        ("one two", {"until": [], "max_gen_toks": 3}),
        ("three four", {"until": [], "max_new_tokens": 7}),
        ("five six", {"until": [], "max_gen_toks": 3}),
        ("", {"until": [], "max_gen_toks": 3}),
    )
    answers = KVBoostLM(engine).generate_until(asked, disable_tqdm=True)
    for request, answer in zip(asked[:3], answers, strict=False):
        new_tokens = 7 if request.args[0] == "three four" else 3
        assert answer == engine.generate(request.args[0], new_tokens, mode="baseline").output_text
    assert answers[3] == engine.generate([1], 3, mode="baseline").output_text  # behind the prefix token


# --- lm_eval's own caches and registry -----------------------------------------------------------


def test_registered_under_its_name(tmp_path: Path, tiny_folder: str) -> None:
    task = write_choices(tmp_path, 2)
    assert get_model("kvboost") is KVBoostLM
    results = run("kvboost", task, tmp_path, model_args=f"pretrained={tiny_folder},chunk_size=16,device=cpu")
    assert results["config"]["model"] == "kvboost"
    assert results["config"]["model_dtype"] == "torch.float32"
    with pytest.raises(InvalidRequestError, match="batch_size"):
        run("kvboost", task, tmp_path, model_args=f"pretrained={tiny_folder}", batch_size=8)


def test_responses_are_cached_by_lm_eval(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    for task in (write_choices(tmp_path, 2), write_answers(tmp_path), write_texts(tmp_path)):
        lm = KVBoostLM(engine)
        first = run(lm, task, tmp_path, use_cache=str(tmp_path / "responses"))
        read = lm.prompt_tokens
        assert read
        again = run(lm, task, tmp_path, use_cache=str(tmp_path / "responses"))
        assert lm.prompt_tokens == read
        assert again["results"] == first["results"]


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8}, 'batch_size must be "auto", got 8'),
        ({"max_length": 5_000}, "max_length must be at most 1024"),
        ({"max_length": 0}, "max_length must be an integer"),
        ({"max_gen_toks": 1.5}, "max_gen_toks must be an integer"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"mode": "fast"}, "mode must be one of"),
        ({"chunk_size": 64}, "chunk_size: options cannot be changed"),
    ],
)
def test_bad_options(make_engine: MakeEngine, options: dict[str, Any], message: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=message):
        KVBoostLM(engine, **options)
    assert KVBoostLM(engine, batch_size="auto").engine is engine


def test_an_unknown_option_is_not_ignored() -> None:
    with pytest.raises(InvalidRequestError, match="unknown option 'parallelize'"):
        KVBoostLM("builtin", parallelize=True)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"max_gen_toks": 1_024}, "max_gen_toks must be less than max_length=1024, got 1024"),
        ({"surprise": 1}, "unknown generation option 'surprise'"),
        ({"max_length": 9}, "max_length is not supported"),
        ({"do_sample": True}, "temperature must be greater than 0"),
    ],
)
def test_bad_generation_options(make_engine: MakeEngine, generation: dict[str, Any], message: str) -> None:
    lm = KVBoostLM(make_engine())
    with pytest.raises(InvalidRequestError, match=message):
        lm.generate_until(requests("generate_until", ("a", generation)), disable_tqdm=True)


@pytest.mark.parametrize("pair", [("a", ""), (" ", "b"), ("a", "b" * 20)])
def test_pairs_that_cannot_be_scored(make_engine: MakeEngine, pair: tuple[str, str]) -> None:
    lm = KVBoostLM(make_engine(), max_length=16)
    with pytest.raises(InvalidRequestError, match="needs at least 1 token"):
        lm.loglikelihood(requests("loglikelihood", ("x", "y"), pair), disable_tqdm=True)


# --- evaluate and the command line ---------------------------------------------------------------


def test_evaluate(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    task = write_choices(tmp_path, 6)
    results = evaluate(engine, task, include_path=tmp_path, num_fewshot=5, limit=4)
    theirs = run(hugging_face(engine), task, tmp_path, num_fewshot=5, limit=4)
    compare(results, theirs, task)
    reuse = results["kvboost"]
    assert 0 < reuse["cached_tokens"] < reuse["prompt_tokens"]
    lm = KVBoostLM(engine, max_length=500)
    again = evaluate(lm, [task], include_path=[tmp_path], num_fewshot=5, limit=4, log_samples=False)
    assert "samples" not in again
    assert again["kvboost"]["prompt_tokens"] == reuse["prompt_tokens"] == lm.prompt_tokens
    with pytest.raises(InvalidRequestError, match="max_length: options cannot be changed"):
        evaluate(lm, task, include_path=tmp_path, max_length=7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": []}, "at least one task"),
        ({"tasks": "local", "include_path": "nowhere"}, "include_path must be a folder"),
        ({"tasks": "local", "num_fewshot": -1}, "num_fewshot"),
        ({"tasks": "local", "limit": 0}, "limit"),
        ({"tasks": "local", "limit": "3"}, "limit"),
    ],
)
def test_evaluate_refuses_before_a_model_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        evaluate("no-such-model", **arguments)


def command(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_the_command(tmp_path: Path, tiny_folder: str) -> None:
    task = write_choices(tmp_path, 6)
    given = ["--model", tiny_folder, "--tasks", task, "--include-path", str(tmp_path), "--num-fewshot", "5"]
    given += ["--limit", "4", "-o", "chunk_size=16", "-o", "max_chunks=none", "-o", "device=cpu"]
    outcome = command(*given)
    assert outcome.exit_code == 0, outcome.output
    assert task in outcome.stdout
    assert "acc_norm" in outcome.stdout
    assert "prompt tokens were not read again" in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 100
    file = tmp_path / "results.json"
    outcome = command(*given, "--json", "--output", str(file), "--log-samples")
    assert outcome.exit_code == 0, outcome.output
    printed, written = json.loads(outcome.stdout), json.loads(file.read_text())
    assert printed["results"] == written["results"]
    assert "samples" not in printed
    assert len(written["samples"][task]) == 4
    assert printed["n-shot"][task] == 5


def test_answers_by_the_command(tmp_path: Path, tiny_folder: str) -> None:
    task = write_answers(tmp_path)
    given = ["--model", tiny_folder, "--tasks", task, "--include-path", str(tmp_path), "-o", "device=cpu"]
    given += ["--chat", "--system", "Be brief.", "--gen-option", "max_gen_toks=2", "--json"]
    file = tmp_path / "results.json"
    outcome = command(*given, "--output", str(file), "--log-samples")
    assert outcome.exit_code == 0, outcome.output
    for sample in json.loads(file.read_text())["samples"][task]:
        assert len(sample["resps"][0][0].encode()) <= 6
        assert "Be brief." in str(sample["arguments"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tasks", "t", "--include-path", "nowhere"], 2, "nowhere"),
        ([], 2, "--tasks"),
        (["--tasks", "t", "-o", "chunk_size"], 2, "NAME=VALUE"),
        (["--tasks", "t", "--log-samples"], 2, "--output"),
        (["--tasks", "t", "--output", "nowhere/results.json"], 2, "there is no folder"),
        (["--tasks", "t", "--limit", "0"], 2, "--limit"),
        (["--tasks", "local_choices", "-o", "surprise=1"], 1, "unknown option 'surprise'"),
        (["--tasks", "local_choices", "--model", "/no/such/model"], 1, "/no/such/model"),
        (["--tasks", "broken"], 1, "gone.jsonl"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    write_choices(tmp_path, 1)
    text = (tmp_path / "local_choices.yaml").read_text()
    broken = text.replace("local_choices-test", "gone").replace('"local_choices"', '"broken"')
    (tmp_path / "broken.yaml").write_text(broken)
    if "--include-path" not in arguments:
        arguments = [*arguments, "--include-path", str(tmp_path)]
    outcome = command("--model", "builtin", *arguments)
    assert outcome.exit_code == code, outcome.output
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    if code == 1:
        assert len(outcome.stderr.strip().splitlines()) == 1


def test_an_unknown_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no task 'surprise' in lm_eval or"):
        evaluate("no-such-model", ["arc_easy", "surprise"], include_path=tmp_path)


def test_help_and_missing_lm_eval() -> None:
    """As a program of its own; and kvboost itself never imports lm_eval."""

    def python(*arguments: str) -> Any:
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)

    outcome = python("-m", "kvboost.integrations.lm_eval", "--help")
    assert outcome.returncode == 0, outcome.stderr
    assert not outcome.stderr
    for option in ("--model", "--tasks", "--include-path", "--num-fewshot", "--limit", "--json", "--output"):
        assert option in outcome.stdout
    hide = "import sys; sys.modules['lm_eval'] = None; "
    run_as_program = "import runpy; runpy.run_module('kvboost.integrations.lm_eval', run_name='__main__')"
    outcome = python("-c", hide + run_as_program)
    assert outcome.returncode == 1
    assert "pip install lm_eval" in outcome.stderr
    assert len(outcome.stderr.strip().splitlines()) == 1
    clean = "import kvboost.engine, kvboost.cli.main, sys; print('lm_eval' in sys.modules); "
    outcome = python("-c", clean + hide + "import kvboost.integrations.lm_eval")
    assert outcome.stdout.strip() == "False"
    assert "ImportError: kvboost.integrations.lm_eval needs lm_eval" in outcome.stderr


# --- the benchmark ---------------------------------------------------------------------------------


def test_the_benchmark(make_engine: MakeEngine) -> None:
    steps: list[tuple[int, int, str]] = []
    engine = make_engine()
    record = evaluation.measure(
        engine,
        model="tiny",
        questions=3,
        shots=2,
        passage_tokens=120,  # of one letter each
        batch_sizes=(2, 1),
        rounds=3,
        plain_rounds=2,
        report=lambda *step: steps.append(step),
    )
    assert json.loads(json.dumps(record))["benchmark"] == "evaluation"
    assert [step[:2] for step in steps] == [(done, 7) for done in range(7)]
    results = record["results"]
    assert {name: each["seconds"]["count"] for name, each in results["contestants"].items()} == {
        "hf, batch size 2": 2,
        "hf, batch size 1": 2,
        "kvboost": 3,
    }
    assert results["requests"] == 12
    assert results["largest_difference"] <= TOLERANCE
    assert results["same_scores"] is True
    assert 0 < results["cached_tokens"] < results["prompt_tokens"]
    assert engine.cache_stats()["chunks"] == 0
    table = bench_evaluation.evaluation_table(record)
    assert table.row_count == 3
    assert "All 12 log-likelihoods agree" in bench_evaluation.agreement_line(record)


def test_the_benchmark_notices_other_scores_and_slowness() -> None:
    def contestant(name: str, seconds: float, value: float) -> evaluation.Contestant:
        lm = type("LM", (), {"prompt_tokens": 2, "cached_tokens": 1})()
        made = evaluation.Contestant(name, lm, lambda: None)
        made.seconds, made.cpu_seconds = [seconds], [seconds]
        made.metrics, made.responses = [{"acc,none": 0.5}], [[(value, False)]]
        return made

    for ours, met in (
        ((10.0, -3.0), [True, True]),
        ((20.0, -3.0), [False, True]),
        ((10.0, -3.1), [True, False]),
    ):
        contestants = [contestant("slow", 90.0, -3.0), contestant("fast", 40.0, -3.0), contestant("k", *ours)]
        results = evaluation._results(contestants)
        assert results["peer"] == "fast"
        assert [target["met"] for target in evaluation.targets(results)] == met
    assert evaluation._difference([(float("nan"), True)], [(1.0, True)]) == float("inf")


def test_the_defaults_of_the_benchmark_command_are_those_of_its_settings() -> None:
    settings = evaluation.EvaluationSettings()
    for option in bench_evaluation.evaluation.params:
        if option.name == "batch_sizes":
            assert option.default == ",".join(map(str, settings.batch_sizes))
        elif hasattr(settings, str(option.name)):
            assert option.default == getattr(settings, str(option.name))
