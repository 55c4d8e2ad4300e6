# `make demo` and `make test` set up everything they need on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Two OpenMP threads that wait actively slow each other down tenfold when anything else runs.
export OMP_WAIT_POLICY := passive
# Tests that start processes compile the package once, also where this variable is set.
unexport PYTHONDONTWRITEBYTECODE

# The browser of the tests of the studio, where it is missing.
CHROMIUM := tests/studio/install_chromium.sh

.PHONY: studio studio-build demo test quick fuzz fuzz-coverage fuzz-api faults claims check docs records release-check install clean oracles families

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
	@bash $(CHROMIUM)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The studio on the run of `make demo`.
studio: $(STAMP)
	@test -d runs/demo || $(BIN)/transduce demo
	$(BIN)/transduce studio runs/demo

# The files of the studio for the browser, in src/transduce/studio/static. Users and tests need no node: they are committed.
studio-build:
	cd studio && npm ci --no-audit --no-fund && npm run build

# Unit tests and the laws on a thinned registry: the loop of a contributor, under two minutes on two cores.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --quick

# Thousands of damaged inputs, on one core. The records are what docs/reliability.md states.
FUZZ_FACTOR ?= 6
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 FUZZ_FACTOR=$(FUZZ_FACTOR) FUZZ_RECORD=benchmarks/results/reliability \
		$(BIN)/python -m pytest tests/fuzz -k 'not harness'
	$(BIN)/python docs/generate.py

# The parsers under atheris, which searches for inputs that reach new lines: about an hour on one core.
FUZZ_RUNS ?= 10000
fuzz-coverage: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[fuzz]'
	OMP_NUM_THREADS=1 FUZZ_RECORD=benchmarks/results/reliability \
		$(BIN)/python tests/fuzz/coverage_guided.py --runs $(FUZZ_RUNS)
	$(BIN)/python docs/generate.py

# Injected faults, 100 SIGKILLs of training among them, on one core: about fifteen minutes. The records are what
# docs/reliability.md states.
FAULT_FACTOR ?= 12.5
FAULT_TESTS := tests/training/test_faults.py tests/training/test_lock.py tests/training/test_provenance.py tests/training/test_fsdp.py \
	tests/data/test_corpus_pipeline.py tests/data/readers/test_remote.py tests/cli/test_bulk_generate.py tests/cli/test_ray.py
faults: $(STAMP)
	OMP_NUM_THREADS=1 FAULT_FACTOR=$(FAULT_FACTOR) FAULT_RECORD=benchmarks/results/faults \
		$(BIN)/python -m pytest $(FAULT_TESTS)
	$(BIN)/python docs/generate.py

# At least 5,000 requests that schemathesis draws from the description of the server, on one core: some routes have fewer
# different ones than their share.
fuzz-api: $(STAMP)
	OMP_NUM_THREADS=1 API_FUZZ_CASES=6000 API_FUZZ_RECORD=benchmarks/results/api-fuzz.json \
		$(BIN)/python -m pytest tests/serving/protocols/test_api_schema.py

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
	OMP_NUM_THREADS=1 RECORD_TOOLKITS=benchmarks/results/toolkits.json $(BIN)/python -m pytest \
		tests/interop/legacy/test_recorded.py tests/interop/legacy/test_export.py
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
