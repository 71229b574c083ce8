# make demo    runs the main job on real input, into an embedded broker
# make test    checks format, lint and types, and runs the quick tests, in 15 to 25 minutes
# make test-all also runs the slow tests, and those of the kernel under sanitizers (make sanitizers)
# make faults  runs every row of the fault matrix. SEEDS=20 runs the rows that kill and freeze brokers with 20 seeds.
#              KILLS=200 kills a driver of exactly-once delivery 200 times.
# make docs    builds the website of docs/ into build/site, and fails on a broken link
# make soak    runs producers while brokers are killed and disconnected; MINUTES=10 SEED=1
# make dist    builds the packages of a release, for every platform, into dist/. make dist-test installs them.
# Each target sets itself up. It needs Python 3.11 or newer, and Java 17 or newer.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
INSTALL := -m pip install --quiet --disable-pip-version-check
PINNED := $(INSTALL) --constraint constraints.txt

.PHONY: demo test test-all setup check unit loopback integration-brokers integration-spark integration-jobs \
        integration-slow sanitizers test-pyspark test-kerberos faults faults-quick soak microbenchmark measured \
        benchmark compare exactly-once-cost constraints dist dist-test docs notebook format clean

# Images often forbid Python to keep bytecode. Then each of Spark's Python workers compiles the package: 1.5 instead of 1.1 seconds.
export PYTHONDONTWRITEBYTECODE :=

setup: $(SETUP)

KERNEL := $(wildcard spark_kafka_sink/record/*.c spark_kafka_sink/serialization/*.c)
HEADERS := $(wildcard spark_kafka_sink/record/*.h spark_kafka_sink/serialization/*.h)

$(SETUP): setup.cfg setup.py pyproject.toml constraints.txt $(KERNEL) $(HEADERS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python $(PINNED) --editable '.[local,test,engine]'
	@touch $@

# An archive of Spark's classes, for tests that start a Spark of their own
SPARK_CLASSES := build/spark-classes.jsa
$(SPARK_CLASSES): $(SETUP) tests/support/spark_classes.py
	@$(BIN)/python tests/support/spark_classes.py $@

demo: $(SETUP)
	$(BIN)/python jobs/demo.py

# Run three parts at a time, the longest first: those with Spark wait more than they compute.
test: $(SETUP) $(SPARK_CLASSES)
	@$(MAKE) --no-print-directory -j3 --output-sync=line \
	    integration-jobs integration-spark unit integration-brokers check loopback faults-quick

test-all: test sanitizers integration-slow notebook docs

check: $(SETUP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(SETUP)
	$(BIN)/python -m pytest tests/unit -q -m 'not slow'

loopback: $(SETUP)
	$(BIN)/python -m pytest tests/loopback -q

# Run the tests of the compiled kernel, and of the rows that it takes, under AddressSanitizer and UBSan. They end the run at the
# first fault. Python and Arrow take each buffer from malloc, so that the sanitizer finds accesses beyond its end. It does not
# look for leaks, because Python keeps memory until it ends.
SANITIZED := build/sanitizers/_kernel.abi3.so
sanitizers: $(SETUP)
	@gcc -print-file-name=libasan.so | grep -q / || { echo "make sanitizers needs gcc with libasan"; exit 1; }
	@mkdir -p $(dir $(SANITIZED))
	gcc -shared -fPIC -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
	    -I$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('include'))") \
	    $(KERNEL) -o $(SANITIZED)
	SANITIZED_KERNEL=$(abspath $(SANITIZED)) PYTHONPATH=tests PYTHONMALLOC=malloc ARROW_DEFAULT_MEMORY_POOL=system \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	    $(BIN)/python -m pytest tests/unit/record tests/unit/serialization tests/unit/sink/test_rows_odd.py tests/unit/sink/test_rows.py -q \
	    -p support.sanitized_kernel

integration-brokers: $(SETUP)
	$(BIN)/python -m pytest tests/integration/local tests/integration/admin tests/integration/doctor tests/integration/producer -q -m 'not slow and not kerberos'
	$(BIN)/python -m pytest tests/integration/exactly_once/test_kills.py -q -m 'not slow'

integration-spark: $(SETUP)
	$(BIN)/python -m pytest tests/integration/sink -q -m 'not slow'

integration-jobs: $(SETUP)
	$(BIN)/python -m pytest tests/integration/jobs tests/integration/examples tests/integration/pipelines tests/integration/test_readme_examples.py -q -m 'not slow'

# Run the tests that take minutes (beside Spark's own sink, on clusters, with kills and restarts), and the scripts of benchmarks/.
integration-slow: $(SETUP)
	$(BIN)/python -m pytest tests/unit -q -m slow
	$(BIN)/python -m pytest tests/integration/local tests/integration/producer tests/integration/sink tests/integration/jobs \
	    tests/integration/test_readme_examples.py -q -m slow
	$(BIN)/python -m pytest tests/integration/benchmarks -q
	$(BIN)/python -m pytest tests/integration/parity -q
	$(BIN)/python -m pytest tests/integration/registry -q
	$(BIN)/python -m pytest tests/integration/deploy -q
	$(BIN)/python -m pytest tests/integration/pipelines -q -m slow
	$(BIN)/python -m pytest tests/integration/exactly_once --ignore tests/integration/exactly_once/test_kills.py -q

# make test-pyspark PYSPARK=3.5.7 runs the tests on Spark with another PySpark, the kills of exactly-once delivery among them, in
# an environment of its own, with the newest versions that fit this PySpark. TESTS=FOLDER runs a part. The results go to
# tests/pyspark_results, and docs/pyspark-versions.md is made of them. PySpark before 4.2 leaves sockets open, so warnings of
# Python about them are ignored. PySpark 3.5 also uses Python's distutils, and needs numpy 1, which only an older pyarrow takes.
ON_SPARK := tests/unit/record/test_tables.py tests/unit/record/test_values.py tests/integration/sink tests/integration/test_readme_examples.py \
    tests/integration/deploy tests/integration/exactly_once
# the oldest packages that setup.cfg allows
OLDEST := 'numpy==1.23.5' 'pyarrow==14.0.1' 'pandas==2.2.3'
IGNORED := -W ignore::DeprecationWarning -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
test-pyspark: OTHER := .venv-pyspark-$(PYSPARK)
test-pyspark:
	@test -n "$(PYSPARK)" || { echo "PYSPARK is missing: make test-pyspark PYSPARK=3.5.7"; exit 2; }
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python $(INSTALL) --editable '.[local,test]' 'pyspark[connect]==$(PYSPARK)' $(if $(filter 3.5.%,$(PYSPARK)),$(OLDEST))
	$(OTHER)/bin/python -m pytest $(or $(TESTS),$(ON_SPARK)) --ignore tests/integration/exactly_once/test_kills.py -q $(IGNORED) \
	    --pyspark-results tests/pyspark_results
	$(OTHER)/bin/python tests/unit/test_pyspark_versions.py

# Run with a real KDC, on the loopback interface. This needs krb5kdc, kdb5_util and kadmin.local (Debian: krb5-kdc
# krb5-admin-server), and libkrb5-dev for the package gssapi.
test-kerberos: $(SETUP)
	@$(BIN)/python $(PINNED) --editable '.[local,test,engine,kerberos]'
	$(BIN)/python -m pytest tests/integration/producer -q -m kerberos

faults: $(SETUP)
	@mkdir -p build
	FAULT_SEEDS=$(or $(SEEDS),1) $(BIN)/python -m pytest tests/faults -v -s -p no:randomly --basetemp build/faults
	EXACTLY_ONCE_KILLS=$(or $(KILLS),100) $(BIN)/python -m pytest tests/integration/exactly_once -v -s -p no:randomly -k kill

faults-quick: $(SETUP)
	$(BIN)/python -m pytest tests/faults -m quick -q

soak: $(SETUP)
	@$(BIN)/python $(PINNED) --editable '.[local,test,engine,benchmark]'
	PYTHONPATH=.:tests $(BIN)/python tests/faults/soak.py --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

# Measure in an environment without the packages of tests, as users have it. Such packages take memory in every worker.
MEASURED := .venv-benchmark
measured:
	@test -x $(MEASURED)/bin/python || $(PYTHON) -m venv $(MEASURED)
	@$(MEASURED)/bin/python $(PINNED) --editable '.[local,engine,benchmark,prometheus,openlineage,opentelemetry]'

benchmark: measured
	$(MEASURED)/bin/python benchmarks/benchmark.py

# make compare BEFORE=HEAD~10 compares KafkaSink.write of this tree with that of another commit, by turns, in five cells (15 minutes).
compare: measured
	@test -n "$(BEFORE)" || { echo "BEFORE is missing: make compare BEFORE=HEAD~10"; exit 2; }
	$(MEASURED)/bin/python benchmarks/compare_trees.py $(BEFORE)

microbenchmark: $(SETUP)
	$(BIN)/python benchmarks/microbenchmark.py

# Measure what a batch of exactly-once delivery costs: requests, bytes, control records, latency (docs/performance.md).
exactly-once-cost: $(SETUP)
	$(BIN)/python benchmarks/exactly_once_cost.py

# Write the newest versions that setup.cfg allows into constraints.txt. Run all tests before you commit the file.
constraints: FRESH := build/constraints
constraints:
	@rm -rf $(FRESH) && $(PYTHON) -m venv $(FRESH)
	@$(FRESH)/bin/python $(INSTALL) --editable '.[local,test,engine,benchmark,notebook]'
	@$(FRESH)/bin/python -m pip freeze --exclude-editable > $(FRESH)/frozen
	@(head -1 constraints.txt && cat $(FRESH)/frozen) > $(FRESH)/new && mv $(FRESH)/new constraints.txt

# Build the source distribution and a wheel for each platform (CONTRIBUTING.md, "A release"). zig compiles for all of them.
# make dist URL=https://host/owner/name   also writes the project URLs into the packages, and makes README's links absolute
DIST := .venv-dist
dist:
	@test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	@$(DIST)/bin/python $(INSTALL) --requirement release/requirements.txt
	$(if $(URL),SPARK_KAFKA_SINK_URL=$(URL)) $(DIST)/bin/python -m release.build_wheels

# make dist-test PYTHONS="python3.11 python3.14" PYSPARK="4.1.4 3.5.9"   writes with the packages of dist/ in new environments of
# these Pythons, in which PySpark is installed before: the first version for each Python, the others for the first Python
dist-test:
	$(PYTHON) -m release.try_wheels --source $(PYSPARK:%=--pyspark %) $(or $(PYTHONS),$(PYTHON))

# Execute the notebook of examples/. It needs Jupyter's kernel, which make setup does not install.
notebook: $(SETUP)
	@$(BIN)/python $(PINNED) --editable '.[local,test,engine,notebook]'
	$(BIN)/python -m pytest tests/integration/examples/test_notebook.py -q

# The website, in an environment of its own. To read it: python3 -m http.server --directory build/site
DOCS := .venv-docs
docs:
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python $(INSTALL) --requirement website/requirements.txt
	NO_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs build --strict --quiet

format: $(SETUP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-pyspark-* .venv-benchmark .venv-dist .venv-docs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
