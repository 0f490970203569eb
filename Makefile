# Everything a developer, CI or a new user runs. All of it happens inside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
CODE := dtensor checkpoint storage integrations tools tests
# Tests start some hundred processes, which find all modules compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install check format test mutants demo demo-parallel bench bench-scale bench-dispatch bench-redistribute bench-training bench-random bench-look bench-rewrite operators metas fuzz compile-matrix optimizers cli-page test-matrix test-adapters test-servers test-faults all-environments gpu-check clean

help:
	@echo "make demo    train, kill a rank during a save, resume on another mesh, prove the losses"
	@echo "make demo-parallel   the same by dtckpt's own FSDP x context x tensor parallelism"
	@echo "make bench   checkpoints beside their peers and the machine's limits (BENCH=--help)"
	@echo "make bench-scale   planning for up to 16,384 ranks, simulated"
	@echo "make bench-dispatch   one operator call beside torch's DTensor"
	@echo "make bench-redistribute   redistribute: bytes, memory, plans, wall time on Gloo"
	@echo "make bench-training   a training step beside torch's parallelisms, and elastic ones"
	@echo "make bench-random   random numbers beside torch's own generator"
	@echo "make bench-look   what inspecting a checkpoint and its values costs"
	@echo "make bench-rewrite   resharding a checkpoint beside cp of its files"
	@echo "make operators     every operator against one device; writes docs/operators.md"
	@echo "make fuzz    random programs beside one device (MINUTES=3 SEED=1 FUZZ=--help)"
	@echo "make metas         what planning says of results against what kernels return"
	@echo "make cli-page      docs/cli.md, of what the commands say of themselves"
	@echo "make compile-matrix   models and functions under torch.compile (COMPILING=--help), hours"
	@echo "make optimizers   25 optimizers, saved and resumed in each parallelism (OPTIMIZERS=--help)"
	@echo "make test    the whole test suite"
	@echo "make test-matrix   the quick part of it on other Pythons and another torch"
	@echo "make test-adapters   adapters in environments with the frameworks' releases (ADAPTERS=names)"
	@echo "make test-servers   stores on every object store that can be run here (SERVERS=names)"
	@echo "make test-faults   each fault at each kind of request to an object store, minutes"
	@echo "make all-environments   all of these; writes docs/environments.md (hours at the first time)"
	@echo "make gpu-check   what only a machine with a GPU can show; figures into gpu-figures/"
	@echo "make mutants   changes of the code that some test must notice (MUTANTS=word)"
	@echo "make check   formatter, linter, type checker"
	@echo "make format  apply formatter and safe lint fixes"

EDITABLE := --editable . --config-settings editable_mode=strict
LOG := $(VENV)/install.log

$(VENV)/.deps: pyproject.toml constraints.txt
	@echo "Installing into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@($(PIP) install --quiet --upgrade "pip>=25.1" "setuptools>=77" && \
		$(PIP) install --quiet --constraint constraints.txt torch && \
		$(PIP) install --quiet --constraint constraints.txt --group dev $(EDITABLE)) \
		> $(LOG) 2>&1 || (cat $(LOG); exit 1)
	@find $(CODE) -name '*.py' | sort > $(VENV)/.files
	@touch $@

# The strict editable install is a tree of links, one per module: it is made again whenever files
# have come or gone.
install: $(VENV)/.deps
	@find $(CODE) -name '*.py' | sort | cmp -s - $(VENV)/.files || \
		($(PIP) install --quiet --no-deps --no-build-isolation $(EDITABLE) > $(LOG) 2>&1 \
			|| (cat $(LOG); exit 1))
	@find $(CODE) -name '*.py' | sort > $(VENV)/.files

check: install
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: install
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-matrix: install
	$(BIN)/python -m tests.matrix $(MATRIX)

test-adapters: install
	$(BIN)/python -m tests.adapters $(ADAPTERS)

# Brings what pip does not (Azurite by npm, Ceph's packages) into ~/.cache/dtckpt/servers.
test-servers: install
	$(BIN)/python -m tests.servers $(SERVERS)

# Each fault at each kind of request, and each request as the last one.
test-faults: install
	DTCKPT_FAULTS=whole DTCKPT_SERVERS=fake-s3,fake-gcs OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -n 2 --durations=10 \
		$(addprefix tests/servers/test_,faults.py skew.py outages.py checkpoints.py)

# CI lets these take turns by commit; this runs all of them, and its record is committed.
all-environments: install
	$(BIN)/python -m tests.all_environments --write docs/environments.md

gpu-check: install
	$(BIN)/python -m tools.gpu --record gpu-figures $(GPU)

mutants: install
	$(BIN)/python -m tests.mutants $(MUTANTS)

demo: install
	$(BIN)/python -m tools.demo

demo-parallel: install
	$(BIN)/python -m tools.demo_parallel

bench: install
	@$(PIP) install --quiet --constraint constraints.txt torch_checkpointing==0.1.1 \
		|| echo "torch_checkpointing cannot be installed; its rows will be skipped"
	$(BIN)/python -m tools.bench $(BENCH)

bench-scale: install
	$(BIN)/python -m tools.bench.scale $(BENCH)

bench-dispatch: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.dispatch $(BENCH)

bench-redistribute: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.redistribute $(BENCH)

bench-training: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.training $(BENCH)

bench-random: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.random_numbers $(BENCH)

bench-look: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.looking $(BENCH)

bench-rewrite: install
	$(BIN)/python -m tools.bench.rewriting $(BENCH)

cli-page: install
	$(BIN)/python -m tests.tools.cli.reference --write docs/cli.md

operators: install
	$(BIN)/python -m tests.operators --write docs/operators.md $(OPERATORS)

# The same SEED has the same programs; MINUTES says how many of them.
MINUTES ?= 3
SEED ?= 1
fuzz: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(FUZZ)

compile-matrix: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.compiling $(COMPILING)

optimizers: install
	$(BIN)/python -m tests.optimizers $(OPTIMIZERS)

metas: install
	$(BIN)/python -m tests.operators.metas $(METAS)

clean:
	rm -rf $(VENV) build dist *.egg-info demo-output demo-output-parallel
