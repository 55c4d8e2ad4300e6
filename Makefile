# `make demo` and `make test` set up everything they need on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Two OpenMP threads that wait actively slow each other down tenfold when anything else runs.
export OMP_WAIT_POLICY := passive
# Tests that start processes compile the package once, also where this variable is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick fuzz claims check docs records release-check install clean oracles families

install: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/transduce demo
	@echo
	@echo "The commands above need the environment of this folder: source $(BIN)/activate"

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Unit tests and the laws on a thinned registry: the loop of a contributor, under two minutes on two cores.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --quick

# Thousands of damaged inputs, on one core. The records are what docs/reliability.md states.
FUZZ_FACTOR ?= 6
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 FUZZ_FACTOR=$(FUZZ_FACTOR) FUZZ_RECORD=benchmarks/results/reliability \
		$(BIN)/python -m pytest tests/fuzz -k 'not harness'
	$(BIN)/python docs/generate.py

# The claims of docs/claims/, measured again with short trainings.
claims: $(STAMP)
	$(BIN)/transduce claims --all --quick --out runs/claims
	cp runs/claims/*.json benchmarks/results/claims/
	$(BIN)/python docs/generate.py

# The documented commands again, on one core; reports every number that has changed. About half an hour on a free core.
records: $(STAMP)
	$(BIN)/python docs/records.py

# The original toolkits, in an environment of their own: each trains small models, and what it computes with them is what
# the tests compare with. Then the differences are measured again, which docs/interop.md states.
ORACLES := .venv-oracles
RECORDED := tests/interop/legacy/recorded
TOOLKITS ?= # some of marian opennmt fairseq_models joeynmt_models; empty: all
oracles: $(STAMP)
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python tests/oracles/toolkits/install.py $(ORACLES)
	OMP_NUM_THREADS=1 $(ORACLES)/bin/python tests/oracles/toolkits $(RECORDED) $(TOOLKITS)
	rm -f benchmarks/results/toolkits.json
	OMP_NUM_THREADS=1 RECORD_TOOLKITS=benchmarks/results/toolkits.json $(BIN)/python -m pytest tests/interop/legacy/test_recorded.py
	rm -f benchmarks/results/onnx.json
	OMP_NUM_THREADS=1 RECORD_ONNX=benchmarks/results/onnx.json $(BIN)/python -m pytest tests/interop/test_onnx.py -k graphs
	$(BIN)/python docs/generate.py

# What the tests of Hugging Face families measure, for docs/interop.md.
families: $(STAMP)
	rm -f benchmarks/results/families.json
	OMP_NUM_THREADS=1 FAMILY_RECORD=benchmarks/results/families.json $(BIN)/python -m pytest -q \
		tests/interop/huggingface -k 'equal or equals or same_bits'
	$(BIN)/python docs/generate.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in site/. Building it needs no network; a broken link is an error.
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	NO_COLOR=1 $(BIN)/zensical build --clean --strict

# Wheel and source archive, their files and metadata, and the demo from the wheel in a fresh environment.
release-check: $(STAMP)
	$(BIN)/python .ci/release_check.py

clean:
	rm -rf $(VENV) dist build runs site
