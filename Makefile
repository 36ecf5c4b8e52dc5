# Everything a newcomer needs, in .venv/ and build/ of this folder: `make help`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# Can be overridden, as in `make build PYTHON=python3.12 CUDA=OFF`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
CUDA ?= AUTO
ARGS ?=
NVCC := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))

# Warnings are errors where the compiler is known (CI), not on every newcomer's machine.
WERROR := $(if $(CI),ON,OFF)

COMPILER := $(if $(filter default undefined,$(origin CXX)),c++,$(CXX))
BIN := $(CURDIR)/.venv/bin
# pip would compile modules on one core. Python compiles them when it imports them.
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) --quiet install --no-compile
export PYTHONDONTWRITEBYTECODE :=
STAMPS := .venv/.stamps
CMAKE_OPTIONS = -D FLASH_DMATTN_WERROR=$(WERROR) -D GTest_ROOT=$(CURDIR)/build/googletest/usr

export PATH := $(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
# Without it ccache keeps no file that has a precompiled header.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros

PACKAGE_SOURCES := $(shell find CMakeLists.txt pyproject.toml README.md LICENSE cmake include src \
  bindings python -type f -not -name '*.pyc' 2>/dev/null)
CXX_FILES = $(shell find include src bindings tests benchmarks examples -type f \
  -regex '.*\.\(h\|cpp\|cu\|cuh\)' 2>/dev/null)

.PHONY: help
help: ## this list
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/p' Makefile | column -t -s '|'

.PHONY: build
build: $(STAMPS)/package ## build the library and install the Python package into .venv (CUDA=ON: with the GPU kernels where there is no GPU, too)

.PHONY: demo
demo: plan-demo $(STAMPS)/package $(STAMPS)/demo ## train a small Doge model on the GPU or the CPU (options: ARGS="--help")
	$(BIN)/python examples/demo.py $(ARGS)

.PHONY: plan-demo
plan-demo:
	@echo "make demo: sets up .venv (torch, the CPU library; CUDA kernels where there is a GPU), trains, writes text, measures and draws."
	@echo "It takes 8 to 12 minutes on two cores the first time, of which it trains 150 s at most, and twenty more for CUDA kernels."

.PHONY: retrofit
retrofit: $(STAMPS)/package $(STAMPS)/retrofit ## teach a published model on a CPU or GPU which keys to keep, and compare (options: ARGS="--help")
	PYTHONPATH=examples $(BIN)/python -m retrofit $(ARGS)

.PHONY: docs
docs: $(STAMPS)/tools $(STAMPS)/docs ## build the site of the documents into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict  # not --quiet, under which a warning is no error

.PHONY: pictures
pictures: $(STAMPS)/docs ## draw the pictures of README from the records of the benchmarks
	$(BIN)/python tools/site/pictures.py

.PHONY: wheels
WHEELS ?= cpu
wheels: $(STAMPS)/tools $(STAMPS)/torch $(STAMPS)/wheels $(if $(filter cuda,$(WHEELS)),$(STAMPS)/cuda) | compiler ## build wheels for others into dist/ (WHEELS="cpu aarch64 cuda")
	tools/build_wheels.sh $(WHEELS)

.PHONY: bench
bench: $(STAMPS)/package $(STAMPS)/demo ## measure against PyTorch on this machine, into build/cpu.json (options: ARGS=...)
	$(BIN)/python benchmarks/bench.py run --case dense dynamic_mask scaling --device cpu --threads 2 --json build/cpu.json $(ARGS)

.PHONY: bench-kernels
bench-kernels: $(STAMPS)/tools build/benchmark/ready ## measure the stages of the C++ library on the CPU (options: ARGS=...)
	cmake --preset bench -D benchmark_ROOT=$(CURDIR)/build/benchmark/usr $(CMAKE_OPTIONS)
	cmake --build --preset bench --target bench_core
	build/bench/benchmarks/bench_core $(ARGS)

# DONE: steps that .ci/run runs by itself.
DONE ?=
STEPS := plan check-format docs test-cpp test-python test-python-avx2 test-transformers-4 test-sanitize test-kernels test-cuda-build
.PHONY: test
test: $(filter-out $(DONE),$(STEPS)) ## everything a change has to pass

.PHONY: plan
plan:
	@echo "make test: format, documents, C++, Python, Python with AVX2, transformers 4.57, C++ under sanitizers, the layout of Hugging Face's kernels, CUDA kernels."
	@echo "The Python tests take 12 core-minutes, the C++ tests 2, sanitizers and compilers the rest. It ends at the first failure."

# pip installs these for the steps after the first.
.PHONY: packages
packages: $(STAMPS)/test build/transformers-4/ready $(if $(NVCC),$(STAMPS)/cuda)

.PHONY: test-cpp
test-cpp: $(STAMPS)/tools build/googletest/ready ## C++ tests, on every instruction set of this machine
	cmake --preset cpu -D FLASH_DMATTN_TESTS=ON $(CMAKE_OPTIONS)
	cmake --build --preset cpu --target all all_verify_interface_header_sets
	ctest --preset cpu --parallel $(JOBS)
	@tools/list_skipped.sh build/cpu

# SANITIZED: the instruction sets, each of which then has the whole case table. Without it, the tests run on one set, and no other is compiled,
# which takes a minute of a core.
ONE_SET = $(shell grep -qm1 avx512_bf16 /proc/cpuinfo && echo avx512_bf16 || echo avx2)
.PHONY: test-sanitize
test-sanitize: $(STAMPS)/tools build/googletest/ready ## C++ tests under AddressSanitizer and UBSan; most do not compare results
	cmake --preset dev -D "FLASH_DMATTN_INSTRUCTION_SETS=$(or $(SANITIZED),$(ONE_SET))" $(CMAKE_OPTIONS)
	cmake --build --preset dev
	ctest --preset $(if $(SANITIZED),dev-whole,dev) --parallel $(JOBS)
	@tools/list_skipped.sh build/dev

.PHONY: test-python
test-python: $(STAMPS)/package $(STAMPS)/test ## Python tests, on the installed package
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

.PHONY: families
families: $(STAMPS)/package $(STAMPS)/test build/families/ready ## compare every family of transformers with eager attention, write docs/model-families.md and the table of families (options: ARGS=...)
	OMP_NUM_THREADS=1 PYTHONPATH=build/families $(BIN)/python tools/compare_families.py $(ARGS)

# Runs only the Python tests whose results the CPU kernels compute: selection and its checks are compiled for the baseline, and test-cpp has
# run the case table. test-transformers-4 runs those of models with AVX2.
.PHONY: test-python-avx2
test-python-avx2: $(STAMPS)/package $(STAMPS)/test ## Python tests with AVX2, the largest instruction set of most desktops, where the processor has more
	@$(BIN)/python -m flash_dmattn info | grep -E '^ *cpu +yes +(avx512|amx)' >/dev/null || { \
	  echo "SKIPPED test-python-avx2: this processor has no more than AVX2, which test-python runs on"; exit 0; }; \
	FLASH_DMATTN_MAX_ISA=avx2 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal \
	  -k 'not case_table and not triton and not compile and not import and not memory and not instruction_sets and not bad and not recall' \
	  tests/python/api tests/python/autograd tests/python/generation tests/python/selection/test_rules.py $(ARGS)

# Two of the architectures that a release has: one of each class of shared memory, each with its own kernels.
CUDA_TEST_ARCHITECTURES ?= 86-real;90-real
# Where no GPU runs the kernels, the step shows only that they compile, and that the machine code of sm90's for bf16 passes its check.
CUDA_ONLY_COMPILE := $(if $(wildcard /dev/nvidiactl),OFF,ON)

.PHONY: test-cuda-build
ifeq ($(NVCC),)
test-cuda-build: ## compile the CUDA kernels, load them, and run their tests where there is a GPU (needs nvcc)
	@echo "SKIPPED test-cuda-build: there is no nvcc on the PATH or in /usr/local/cuda/bin"
else
test-cuda-build: $(STAMPS)/tools $(STAMPS)/test $(STAMPS)/cuda build/googletest/ready build/benchmark/ready
	CUDACXX=$(NVCC) cmake --preset cuda -D FLASH_DMATTN_TORCH=ON -D FLASH_DMATTN_TESTS=ON -D FLASH_DMATTN_BENCHMARKS=ON \
	  -D benchmark_ROOT=$(CURDIR)/build/benchmark/usr \
	  -D Python_EXECUTABLE=$(BIN)/python -D "FLASH_DMATTN_CUDA_ARCHITECTURES=$(CUDA_TEST_ARCHITECTURES)" \
	  -D FLASH_DMATTN_CUDA_ONLY_COMPILE=$(CUDA_ONLY_COMPILE) $(CMAKE_OPTIONS) \
	  -D FLASH_DMATTN_CUDA_EXTRA_FAMILIES=$(CURDIR)/tests/cuda/families/empty \
	  -D "CMAKE_PROGRAM_PATH=$$(echo $(CURDIR)/.venv/lib/python*/site-packages/nvidia/cu*/bin)"
	cmake --build --preset cuda --target flash_dmattn_torch cuda_tests bench_core bench_selection
	@tools/list_compile_seconds.sh build/cuda
	ctest --test-dir build/cuda --label-regex '^cuda$$' --output-on-failure
	@tools/list_skipped.sh build/cuda
	PYTHONPATH=python FLASH_DMATTN_LIBRARY=$(CURDIR)/build/cuda/bindings/torch/_C.so FLASH_DMATTN_TEST_CUDA_BUILD=1 \
	  $(BIN)/python -m pytest -m gpu $(addprefix tests/python/,gpu api autograd generation)
endif

# Everything but GoogleTest is that of $(PYTHON): no .venv is made.
.PHONY: test-gpu
test-gpu: build/googletest/ready ## build for the GPU of this machine, run the tests that need it, write docs/tested.md (SUITES="cuda sanitizer python")
	$(PYTHON) tools/test_gpu.py $(SUITES) $(ARGS)

.PHONY: test-kernels
test-kernels: $(STAMPS)/package $(STAMPS)/test ## load a build in the layout of Hugging Face's kernels together with the installed package
	$(BIN)/python tools/write_kernels_layout.py build/kernels/layout --build build/kernels/build \
	  -D FLASH_DMATTN_WERROR=$(WERROR) --namespace _flash_dmattn_layout
	FLASH_DMATTN_TEST_KERNELS=build/kernels/layout $(BIN)/python -m pytest tests/python/tools/test_kernels_layout.py

.PHONY: test-transformers-4
test-transformers-4: $(STAMPS)/package $(STAMPS)/test build/transformers-4/ready ## Python tests of transformers' own models, on transformers 4.x, with AVX2
	FLASH_DMATTN_MAX_ISA=avx2 OMP_NUM_THREADS=1 PYTHONPATH=build/transformers-4 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal \
	  -m transformers tests/python/integrations $(ARGS)

# With torch it takes 5 GB of disk and a minute more: pip's newest torch has CUDA.
NEWEST ?= transformers
.PHONY: test-newest
test-newest: $(STAMPS)/package $(STAMPS)/test ## Python tests of transformers' own models, on the newest transformers that pip finds now (NEWEST="transformers torch")
	JOBS=$(JOBS) tools/test_newest.sh $(NEWEST)

# Their tests are in source distributions alone. pip runs the setup.py of flash-attention, which builds nothing here.
PEERS := build/peers
FLASH_ATTN := $(PEERS)/flash_attn-2.8.3
KVPRESS := $(PEERS)/kvpress-0.5.5
TRANSFORMERS_TESTS = $(PEERS)/transformers-$(shell $(BIN)/python -c "import transformers; print(transformers.__version__)")
$(PEERS)/ready: Makefile $(STAMPS)/test
	rm -rf $(PEERS) && mkdir -p $(PEERS)
	$(PIP) --quiet install --no-deps --target $(PEERS)/packages parameterized==0.9.0 \
	  openfold3==0.5.0 absl-py==2.5.1 biotite==1.6.0 gemmi==0.7.5 ml-collections==1.1.0 scipy==1.17.1 einops==0.8.1
	$(PIP) --quiet download --no-deps --no-binary :all: --dest $(PEERS) \
	  transformers==$(TRANSFORMERS_TESTS:$(PEERS)/transformers-%=%) $(KVPRESS:$(PEERS)/kvpress-%=kvpress==%)
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(PIP) --quiet download --no-deps --no-binary :all: --no-build-isolation --dest $(PEERS) \
	  $(FLASH_ATTN:$(PEERS)/flash_attn-%=flash-attn==%)
	tar --extract --gzip --file $(TRANSFORMERS_TESTS).tar.gz --directory $(PEERS)
	$(foreach tests,$(FLASH_ATTN) $(KVPRESS),tar --extract --gzip --file $(tests).tar.gz --directory $(PEERS) $(notdir $(tests))/tests;)
	touch $(TRANSFORMERS_TESTS)/tests/__init__.py $@

.PHONY: test-peers
test-peers: $(STAMPS)/package $(PEERS)/ready test-kvpress ## tests that other projects wrote, with our attention
	cd $(TRANSFORMERS_TESTS) && HF_HUB_OFFLINE=1 PYTHONPATH=../packages:../$(notdir $(FLASH_ATTN))/tests $(abspath $(BIN))/python -m pytest -c /dev/null \
	  --rootdir . --numprocesses $(JOBS) $(abspath tests/peers) $(ARGS)
	$(MAKE) test-torchtitan ARGS=

.PHONY: test-kvpress
test-kvpress: $(STAMPS)/package $(PEERS)/ready build/transformers-4/ready ## tests of kvpress, with our attention in small models
	cd $(KVPRESS) && OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$(abspath build/transformers-4):$(abspath tests/peers) \
	  $(abspath $(BIN))/python -m pytest -c /dev/null --rootdir . -p kvpress_models --numprocesses $(JOBS) tests \
	  --ignore tests/integration --ignore tests/test_evaluation_utils.py

.PHONY: test-torchtitan
test-torchtitan: $(STAMPS)/package $(STAMPS)/test ## tests of dynamic masks in TorchTitan, and one of TorchTitan's, in a separate environment
	tools/test_torchtitan.sh $(ARGS)

.PHONY: test-vllm
test-vllm: $(STAMPS)/package $(STAMPS)/test ## tests of the plugin for vLLM, with vLLM for CPUs in an environment of its own (1.1 GB of build/)
	tools/test_vllm.sh $(ARGS)

.PHONY: release-check
release-check: ## what make test leaves out to be quick: every case under sanitizers on each instruction set of this processor, CUDA kernels optimised for every GPU, Triton's in double, what inductor compiles (an hour of a core)
	FLASH_DMATTN_TEST_RELEASE=1 $(MAKE) test-python ARGS="tests/python/backends/test_triton_fits_other_gpus.py tests/python/integrations/test_aot_inductor.py tests/python/autograd/test_compile_autocast_checkpoint.py"
	$(MAKE) test-sanitize SANITIZED="generic;avx2;avx512;avx512_bf16;amx_bf16"
	$(MAKE) test-cuda-build CUDA_ONLY_COMPILE=OFF CUDA_TEST_ARCHITECTURES="80-real;86-real;89-real;90-real;90-virtual"

.PHONY: format
format: $(STAMPS)/tools ## format every file
	clang-format -i $(CXX_FILES)
	ruff check --fix --quiet .
	ruff format --quiet .

.PHONY: check-format
check-format: $(STAMPS)/tools ## check the format of every file, change nothing
	clang-format --dry-run -Werror $(CXX_FILES)
	ruff format --check .
	ruff check .

.PHONY: clean
clean: ## remove build/ (and leave .venv/)
	rm -rf build

# ---- Set-up: a stamp is newer than what it was made from -------------------------------------------

.PHONY: compiler
compiler:
	@command -v $(firstword $(COMPILER)) >/dev/null || { \
	  echo "No C++ compiler found ($(COMPILER)): install one (Debian, Ubuntu: apt install g++) or set CXX." >&2; \
	  exit 1; }

$(STAMPS)/venv: | compiler
	@command -v $(PYTHON) >/dev/null || { \
	  echo "No $(PYTHON) found: install Python 3.10 or newer, or set PYTHON." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$$($(PYTHON) --version) is too old: Python 3.10 or newer is needed; set PYTHON to one." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)." >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) 'pip>=25.1'
	@mkdir -p $(@D) && touch $@

$(STAMPS)/tools $(STAMPS)/docs $(STAMPS)/wheels $(STAMPS)/cuda: $(STAMPS)/%: pyproject.toml $(STAMPS)/venv
	$(PIP_INSTALL) --group $*
	@touch $@

# Before everything that depends on it, so that nothing else chooses the version.
$(STAMPS)/torch: Makefile $(STAMPS)/venv
	$(PIP_INSTALL) $(TORCH)
	@touch $@

$(STAMPS)/demo $(STAMPS)/retrofit $(STAMPS)/test: $(STAMPS)/%: pyproject.toml $(STAMPS)/torch
	$(PIP_INSTALL) $(TORCH) --group $*
	@touch $@

# The compiler by its name in the other builds, not by Python's: ccache then has what those have compiled.
$(STAMPS)/package: $(PACKAGE_SOURCES) $(STAMPS)/tools $(STAMPS)/torch | compiler
	CXX="$(COMPILER)" $(PIP) --verbose install --no-compile --no-build-isolation --no-deps --force-reinstall . \
	  -C build-dir=build/wheel -C cmake.define.FLASH_DMATTN_WERROR=$(WERROR) \
	  -C cmake.define.FLASH_DMATTN_CUDA=$(CUDA)
	@touch $@

build/transformers-4/ready build/families/ready: build/%/ready: pyproject.toml $(STAMPS)/venv
	rm -rf $(@D)
	$(PIP_INSTALL) --no-deps --target $(@D) --group $*
	@touch $@

build/googletest/ready build/benchmark/ready: build/%/ready: | compiler
	tools/provide_cpp_library.sh $* $(@D) $(COMPILER)
	@touch $@
