# Every target sets up what it needs: `make demo` on a fresh clone is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv demo up test unit lint aiperf protos model components export report draft tokens clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	-$(BIN)/triptych kernels
	touch $(STAMP)

demo: venv  ## Starts the stack, asks about a picture, prints answer, timings and trace, stops.
	$(BIN)/triptych demo

up: venv  ## Runs the stack until Ctrl-C.
	$(BIN)/triptych up

WORKERS ?= 2  # Test files run side by side in so many processes.

test: venv  ## Everything, real services included: a quarter of an hour on two cores.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

unit: venv  ## Only what needs no service: a minute and a half.
	$(BIN)/python -m pytest -m 'not integration and not slow and not compose'

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

aiperf: .venv-aiperf/bin/aiperf  ## NVIDIA's benchmark client, in an environment of its own, for its test.

.venv-aiperf/bin/aiperf:
	$(PYTHON) -m venv .venv-aiperf
	.venv-aiperf/bin/pip install --quiet aiperf==0.13.0

protos: venv  ## Regenerates services/triptych/v1 from protos/.
	$(BIN)/python protos/generate.py

model: venv  ## Trains the demo checkpoint from nothing (an hour and a quarter on two quiet cores).
	$(BIN)/python -m triptych.demo.train --out models/demo

components: venv  ## Fits what the visual KV policy compress_visual_low_rank needs to the demo checkpoint.
	$(BIN)/triptych compress models/demo

export: venv  ## Writes model_repository/ from the demo checkpoint.
	$(BIN)/triptych export models/demo --draft models/demo-draft

report: venv  ## Measures the demo model through the running stack and rewrites docs/accuracy.md.
	$(BIN)/triptych evaluate --report docs/accuracy.md

draft: venv  ## Distils the demo's draft tower from models/demo (a quarter of an hour on two quiet cores).
	$(BIN)/python -m triptych.demo.train --out models/demo --draft models/demo-draft --steps 900

tokens: venv  ## Measures token reductions and drafts through the running stack and renews docs/vision-tokens.md.
	$(BIN)/triptych evaluate --count 250 --reduce kmeans:32 --reduce kmeans:16 --reduce merge:32 --reduce merge:16 --draft 0.95 --draft 0.9 \
		--report docs/vision-tokens.md

clean:
	rm -rf $(VENV) .venv-aiperf .mypy_cache .ruff_cache .pytest_cache
