# Every target sets up what it needs: see tools/setup for PYTHON=, TORCH= and CXX=.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Each recipe line runs in the environment that tools/setup left.
ENV = . build/environment;
export OMP_NUM_THREADS ?= 1
RANKS ?= 4
SHARE ?= 5
MESH ?= 2x2
ROUNDS ?= 8
MINUTES ?= 10
SEEDS ?= 20
OUT ?= out/gpu
# The tests of tests/distributed that train and compare weights: on the asynchronous device in all orders.
TRAJECTORIES = trajectory composition checkpointing values_between_units gradients passes skips optimizer adamw_groups \
  views expert_parallel rules user_rules tensor_parallel_steps
# Uses the address, because a host name may not resolve.
TORCHRUN = python -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node

.PHONY: help setup setup-build build test test-python test-cpp test-device test-torch test-async test-kernels test-gpu fuzz demo bench bench-host bench-ns bench-counts bench-memory bench-plan bench-ablation bench-cluster bench-simulate paper wheel docs lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

setup: ## system packages, Python environment, PyTorch, also for tests and lint: only what is missing
	@tools/setup dev

# Skips the packages that only tests and lint need.
setup-build:
	@tools/setup

build: setup-build ## the extension module, installed editable; afterwards only what has changed
	@tools/build

# The C++ tests mostly wait, so Python's run beside them; those on the asynchronous device follow them.
test: setup ## C++ tests, and Python tests: of costly ones a case in SHARE= (5), which the commit draws
	@tools/build all
	@+$(MAKE) --no-print-directory -kj2 test-python test-cpp test-device

# Parts of `test`, which build nothing.
test-python:
	@$(ENV) OMP_WAIT_POLICY=passive python -m pytest -n 3 --dist loadgroup --share $(SHARE) $(ARGS)

test-cpp:
	@$(ENV) ctest --test-dir build/release -j2 --output-on-failure --no-tests=error

test-device:
	@$(ENV) DMUON_TEST_DEVICE=emulated OMP_WAIT_POLICY=passive python -m pytest -p no:cacheprovider --share $(SHARE) \
	  tests/distributed/test_passes.py tests/distributed/test_adamw_groups.py tests/distributed/test_host_parameters.py

test-torch: ## README's program and a part of the tests with another PyTorch, TORCH=2.11.0, beside the one here
	@tools/test_torch $(TORCH) $(ARGS)

test-kernels: setup ## the CUDA kernels on the host, and all bugs planted in them
	@tools/build all
	@ctest --test-dir build/release -R kernels --output-on-failure
	@$(ENV) python -m pytest -n 2 --dist loadgroup tests/kernels tests/async_device/test_cuda_kernels.py $(ARGS)

test-async: setup ## training on the asynchronous device in all orders, the random one with SEEDS= (20) seeds
	@tools/build all
	@$(ENV) ASYNC_SEEDS=$(SEEDS) python -m pytest tests/async_device tests/programs/test_async_device.py $(ARGS)
	@$(ENV) DMUON_TEST_DEVICE=emulated python -m pytest tests/distributed $(ARGS)
	@$(ENV) for run in compute_first-0 side_first-0 issue_order-0 $$(seq -f random-%g $(SEEDS)); do echo "== $$run"; \
	  DMUON_TEST_DEVICE=emulated ASYNC_DEVICE_ORDER=$${run%-*} ASYNC_DEVICE_SEED=$${run#*-} \
	    python -m pytest $(TRAJECTORIES:%=tests/distributed/test_%.py) $(ARGS) || exit 1; done

# Without a GPU the emulated device replaces it, which is among the tests.
test-gpu: ## what one GPU can show, in parts; figures and logs into OUT= (out/gpu)
	@tests/gpu/run $(OUT) $(ARGS)

fuzz: setup ## random training programs on 4 CPU ranks for MINUTES= (10), until one is outside the contract
	@tools/build
	@$(ENV) python -W ignore tests/programs/fuzz.py --minutes $(MINUTES) --seed $$RANDOM $(ARGS)

demo: build ## trains a small GPT on 4 CPU ranks, 2 x 2 (RANKS=, MESH=, ARGS=)
	@$(ENV) $(TORCHRUN) $(RANKS) bench/race.py --mesh $(MESH) $(ARGS)

bench: build ## step times on 1 x 4 and 2 x 2 ranks, with more tokens, of each rule, and of pi0's shape; step() over many matrices, apart and as one parameter
	@$(ENV) $(TORCHRUN) 4 bench/train_step.py --mesh 1x4 --json out/bench/1x4.json $(ARGS)
	@$(ENV) $(TORCHRUN) 4 bench/train_step.py --mesh 2x2 --json out/bench/2x2.json $(ARGS)
	@$(ENV) $(TORCHRUN) 4 bench/train_step.py --mesh 2x2 --towers 2 --json out/bench/pi0.json $(ARGS)
	@$(ENV) $(TORCHRUN) 4 bench/train_step.py --mesh 1x4 --optim ddp,replicated --json out/bench/ddp.json $(ARGS)
	@$(ENV) $(TORCHRUN) 4 bench/train_step.py --mesh 1x4 --batch 32 --rounds 5 --json out/bench/1x4-more.json $(ARGS)
	@$(ENV) $(TORCHRUN) 4 bench/train_step.py --mesh 1x4 --batch 32 --rounds 5 --optim ddp,replicated --json out/bench/ddp-more.json $(ARGS)
	@$(ENV) $(TORCHRUN) 4 bench/train_step.py --mesh 1x4 --optim adamw,dmuon,dmuon:normuon,dmuon:adamuon --json out/bench/rules.json $(ARGS)
	@$(ENV) python bench/step_host_time.py
	@$(ENV) python bench/step_host_time.py --matrices 64 --shape 64x512 --rounds 15 --steps 3

bench-counts: setup ## what a step asks of an accelerator, on 2 x 2 ranks: kernels, launches, waits of the host
	@tools/build all
	@$(ENV) $(TORCHRUN) 4 bench/device_counts.py $(ARGS)

bench-memory: setup ## memory of an accelerator at the peak of a step, on 2 x 2 and 1 x 4 ranks
	@tools/build all
	@$(ENV) for mesh in 2x2 1x4; do $(TORCHRUN) 4 bench/device_memory.py --mesh $$mesh $(ARGS) || exit 1; done

bench-host: build ## CPU time of a step's host side at 16 and 256 ranks that do not exist, beside FSDP2 with AdamW
	@$(ENV) for mesh in 2x8 32x8; do python bench/host_time.py --mesh $$mesh --json out/bench/host-$$mesh.json $(ARGS) || exit 1; done

bench-ns: build ## Newton-Schulz alone: against torch.optim.Muon's, plain products and the floor; time by batch size
	@$(ENV) python bench/newton_schulz.py --draw out/bench/batched.svg --json out/bench/newton_schulz.json $(ARGS)

bench-plan: build ## gaps and times of plans, and predicted beside measured optimizer times
	@$(ENV) cmake --build build/release --target plan_stress && build/release/bench/plan_stress && build/release/bench/plan_stress --largest
	@$(ENV) $(TORCHRUN) 2 bench/plan_prediction.py --mesh 1x2 --json out/bench/plan_prediction-1x2.json $(ARGS)
	@$(ENV) $(TORCHRUN) 4 bench/plan_prediction.py --mesh 2x2 --json out/bench/plan_prediction-2x2.json $(ARGS)

bench-ablation: build ## what balance and batches are worth, on 1 x 2 and 2 x 2 ranks (ROUNDS=)
	@$(ENV) $(TORCHRUN) 2 bench/ablation.py --mesh 1x2 --variants plan --rounds $(ROUNDS) --json out/bench/ablation-plan-1x2.json $(ARGS)
	@$(ENV) $(TORCHRUN) 4 bench/ablation.py --mesh 2x2 --variants plan --rounds $(ROUNDS) --json out/bench/ablation-plan-2x2.json $(ARGS)

# Arguments: nodes, bandwidth, program. Status 77: the machine cannot do this; tools/cluster has printed the reason.
bench-cluster: build ## step times and ablations on emulated nodes with limited bandwidth (ROUNDS=)
	@tools/setup cluster
	@$(ENV) for run in "2 1gbit train_step" "2 200mbit train_step" "4 1gbit train_step" "2 1gbit ablation"; do \
	  set -- $$run; echo "== $$3: $$1 nodes of 2 ranks, $$2"; \
	  tools/cluster --nodes $$1 --ranks 2 --rate $$2 -- bench/$$3.py --mesh $$1x2 --rounds $(ROUNDS) \
	    --json out/bench/$$3-$$1x2-$$2.json $(ARGS) || exit $$(($$? == 77 ? 0 : 1)); \
	done
	@$(ENV) tools/cluster --nodes 2 --ranks 2 --rate 1gbit -- bench/train_step.py --mesh 2x2 --optim ddp,replicated \
	  --rounds $(ROUNDS) --json out/bench/ddp-2x2-1gbit.json || exit $$(($$? == 77 ? 0 : 1))

bench-simulate: build ## predicted beside measured steps: 1 x 4 on loopback, and on emulated nodes as bench-cluster (ROUNDS=)
	@tools/setup cluster
	@$(ENV) $(TORCHRUN) 4 bench/simulate.py --mesh 1x4 --rounds $(ROUNDS) --json out/bench/simulate-1x4.json $(ARGS)
	@$(ENV) for run in "2 1gbit" "4 1gbit" "2 200mbit"; do \
	  set -- $$run; echo "== $$1 nodes of 2 ranks, $$2"; \
	  tools/cluster --nodes $$1 --ranks 2 --rate $$2 -- bench/simulate.py --mesh $$1x2 --rounds $(ROUNDS) \
	    --json out/bench/simulate-$$1x2-$$2.json $(ARGS) || exit $$(($$? == 77 ? 0 : 1)); \
	done

paper: build ## the paper's figures as dmuon has them, into out/paper; ARGS=--predicted: without the measured ones
	@$(ENV) python bench/paper.py $(ARGS)

wheel: setup ## for the PyTorch that is installed, into dist/
	@tools/wheel

docs: setup ## the site: all pages, and the reference of Python's and C++'s interfaces, into build/site
	@$(ENV) tools/docs $(ARGS)

lint: setup ## format, types, static analysis, file lengths, the site's links
	@tools/build
	@$(ENV) tools/lint

format: setup ## formats C++ and Python in place
	@$(ENV) tools/lint --fix

clean: ## removes what was built, keeps .venv
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache
