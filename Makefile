# One command each: up, test, check, the benchmarks. CI runs the same ones (.ci/run).
PYTHON ?= python3
VENV ?= .venv
# Passed on to `tailrace up`, pytest and the benchmarks: make up ARGS="--http-port 9090"
ARGS ?=
# Files of tests that run beside each other; 0: none, for a debugger.
TEST_PROCESSES ?= 2
# Passed on to pip, for example to name a mirror.
PIP_ARGS ?=
# What models of our own need: `gpu` where NVIDIA's driver is loaded, else `torch`.
EXTRA ?= $(if $(wildcard /dev/nvidiactl),gpu,torch)
# The Triton that `make aot` compiles with, where it is not the pinned one: make aot AOT_TRITON=3.6.0
AOT_TRITON ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
# Stamps record what the environment holds; newer pins or metadata install again.
MADE := $(VENV)/.stamp-made
RUNTIME := $(VENV)/.stamp-runtime
DEV := $(VENV)/.stamp-dev
RELEASE := $(VENV)/.stamp-release
DOCS := $(VENV)/.stamp-docs
# The folder that `make dist` makes anew.
DIST ?= dist
NPM_INSTALL := npm install --no-package-lock --ignore-scripts --no-audit --no-fund --prefer-offline --silent
# Another Triton lies beside the environment, and is found before the one in it.
AOT_PATH := $(if $(AOT_TRITON),$(abspath $(VENV)/triton-$(AOT_TRITON)))

.DEFAULT_GOAL := help
.PHONY: help up test check schemas docs docs-serve aot wheel dist bench-frame bench-decode bench-resume bench-ledger bench-stream-http bench-path bench-edge bench-worker bench-telemetry bench-kill bench-kill-workers bench-core bench-engine bench-formats bench-scheduler bench-warm bench-pipeline bench-speech bench-readers soak soak-edge soak-models soak-disk bench-gpu clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: $(RUNTIME) ## install what serving needs, then serve the demo model on loopback
	@exec $(BIN)/tailrace up $(ARGS)

test: $(DEV) ## install what the tests need and run them all
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

check: $(DEV) ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict

schemas: $(DEV) ## write the .bare files, the tables for JavaScript and the vectors from the classes of frames
	@$(BIN)/python -m tests.generate_schemas
	@$(BIN)/python -m tests.web.generate
	@$(BIN)/python -m tests.vectors.generate

docs: $(DOCS) ## build the documentation as a site into site/; every link is checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(DOCS) ## serve the documentation on http://127.0.0.1:8000/, built again after each change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve $(ARGS)

aot: $(DEV) $(AOT_PATH) ## compile every GPU kernel for sm_90, a sample for other GPUs, and read the machine code
	@$(if $(AOT_PATH),PYTHONPATH=$(AOT_PATH)) $(BIN)/python -m tailrace.kernels.gate.aot $(ARGS)

wheel: $(RELEASE) ## build the wheel and the sdist into dist/
	@rm -rf $(DIST) && mkdir -p $(DIST)
	@$(BIN)/python -m hatchling build -d $(DIST)
	@$(BIN)/python -m twine check --strict $(DIST)/*.whl $(DIST)/*.tar.gz

dist: wheel ## build the wheel, the sdist, the npm package and the Worker into dist/; needs npm
	@npm pack --silent --pack-destination $(abspath $(DIST)) ./edge/web/tailrace
	@cd wrangler-compat && $(NPM_INSTALL) && node_modules/.bin/esbuild src/worker.ts --bundle \
	  --format=esm --target=es2024 '--external:cloudflare:*' --log-level=warning \
	  --outfile=$(abspath $(DIST))/worker/worker.js
	@sed -e 's|src/worker.ts|worker.js|' -e '/"$$schema"/d' wrangler-compat/wrangler.jsonc > $(DIST)/worker/wrangler.jsonc
	@cp wrangler-compat/README.md LICENSE $(DIST)/worker/
	@ls -l $(DIST) $(DIST)/worker

bench-frame: $(DEV) ## time encode, decode and relay of a token frame
	@$(BIN)/python tests/bench/bench_frame.py $(ARGS)

bench-decode: $(DEV) ## time the demo model's decoding on this machine
	@$(BIN)/python tests/bench/bench_decode.py $(ARGS)

bench-resume: $(DEV) ## time what a reader waits when something is cut or killed
	@$(BIN)/python tests/bench/bench_resume.py $(ARGS)

bench-ledger: $(DEV) ## time the ledger beside Redis, NATS, PostgreSQL and Durable Streams
	@$(BIN)/python tests/bench/bench_ledger.py $(ARGS)

bench-stream-http: $(DEV) ## time appends to durable streams over HTTP, beside the reference server
	@$(BIN)/python tests/bench/bench_stream_http.py $(ARGS)

bench-path: $(DEV) ## time a token from worker to reader, process by process
	@$(BIN)/python tests/bench/bench_path.py $(ARGS)

bench-edge: $(DEV) ## time a relayed frame beside nginx, idle and stalled clients, a storm of resumes, 50,000 readers of a cut link
	@$(BIN)/python tests/bench/bench_edge.py $(ARGS)

bench-telemetry: $(DEV) ## time what telemetry costs of a relayed frame, on and off
	@$(BIN)/python tests/bench/bench_telemetry.py $(ARGS)

bench-worker: $(DEV) ## time the Worker in workerd beside the Python edge; needs Node.js and npm
	@$(BIN)/python tests/bench/bench_worker.py $(ARGS)

bench-kill: $(DEV) ## kill a producer 2,000 times and look for all that it was acknowledged
	@$(BIN)/python tests/bench/bench_kill.py $(ARGS)

bench-kill-workers: $(DEV) ## kill workers 200 times and stop 50 under 32 streams: what was lost, and how long readers wait
	@$(BIN)/python tests/bench/bench_kill_workers.py $(ARGS)

bench-core: $(DEV) ## simulate models, workers and streams under faults from 100,000 seeds; each one that fails is printed
	@$(BIN)/python -m tests.origin.simulation.simulation 0 100000 $(ARGS)

bench-engine: $(DEV) ## time the engine on a CPU, and compare 200 cut runs with uncut ones
	@$(BIN)/python tests/bench/bench_engine.py $(ARGS)

bench-formats: $(DEV) ## train a small Llama, and say what number formats do to its text, memory and speed
	@$(BIN)/python tests/bench/bench_formats.py $(ARGS)

bench-scheduler: $(DEV) ## simulate the scheduler under a mix of arrivals: what each class waits
	@$(BIN)/python tests/bench/simulate_scheduler.py $(ARGS)

bench-warm: $(DEV) ## put generated arrivals through the keep-alive policies, beside the optimum
	@$(BIN)/python tests/bench/bench_warm.py $(ARGS)

bench-pipeline: $(DEV) ## time the tokens of 100 streams through a pipeline, and kill its worker and its model meanwhile
	@$(BIN)/python tests/bench/bench_pipeline.py $(ARGS)

bench-speech: $(DEV) ## measure the stages of speech: processor time, words that are right, and how many live streams run
	@$(BIN)/python tests/bench/bench_speech.py $(ARGS)

bench-readers: $(DEV) ## time a reader that comes late: a replay of 50,000 tokens, and a snapshot in one frame; the usage of 10,000 streams under kills; 2,000 readers of one stream, and of one chat
	@$(BIN)/python tests/bench/bench_readers.py $(ARGS)

soak: $(DEV) ## half an hour of mixed load on one origin, and its chart
	@$(BIN)/python tests/bench/soak_engine.py --chart docs/soak.svg $(ARGS)

soak-edge: $(DEV) ## 8,000 quick WebSockets, 20,000 odd requests, 200 slow heads: what an edge has left of them
	@$(BIN)/python tests/bench/soak_edge.py $(ARGS)

soak-models: $(DEV) ## ten minutes of five models in memory for two, with workers killed: what clients get
	@$(BIN)/python tests/bench/soak_models.py $(ARGS)

soak-disk: $(DEV) ## fill the ledger's disk for 12 s and for 40 s under running streams; needs root
	@$(BIN)/python tests/bench/soak_disk.py $(ARGS)

bench-gpu: ## check and time kernels, steps and serving on a GPU in 9 minutes, with the torch and triton of $(PYTHON)
	@$(PYTHON) tests/bench/bench_gpu.py $(ARGS)

clean: ## remove caches and builds; keeps the environment and .tailrace
	@rm -rf build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(MADE):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: '$(PYTHON)' not found; Tailrace needs Python 3.11 or newer (make up PYTHON=python3.12)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Tailrace needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name another: make up PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' has no venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "==> making the virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUNTIME): pyproject.toml constraints.txt | $(MADE)
	@echo "==> installing edge, origin and ledger (the first time takes about a minute; torch is the largest)"
	@$(PIP_INSTALL) -e '.[$(EXTRA)]'
	@$(BIN)/python -m tailrace.python_build
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(MADE)
	@echo "==> installing edge, origin and ledger with what the tests need (the first time takes minutes)"
	@$(PIP_INSTALL) -e '.[torch,postgres,dev]'
	@$(BIN)/python -m tailrace.python_build
	@touch $@ $(RUNTIME)

$(RELEASE): pyproject.toml constraints.txt | $(MADE)
	@echo "==> installing what builds a release"
	@$(PIP_INSTALL) --quiet 'hatchling>=1.26,<2' 'twine>=6,<8' 'uv>=0.9,<1'
	@touch $@

$(DOCS): pyproject.toml constraints.txt | $(MADE)
	@echo "==> installing what builds the documentation"
	@$(PIP_INSTALL) --quiet -e . 'mkdocs-material>=9.7,<10'
	@touch $@

$(abspath $(VENV))/triton-%: | $(MADE)
	@echo "==> installing triton $*"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps $(PIP_ARGS) --target $@ triton==$*
