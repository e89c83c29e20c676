# Every command of the project. Needs Python 3.11 or newer and make; the rest is installed into .venv from the lock.
PYTHON ?= python3
SEED ?= 1
MINUTES ?= 120
CLUSTERS ?= 2
SOAK ?= --soak
KILLS ?= 200
FAULTS ?= 1000
NUMBER ?= 350
MARKS ?=
BASE ?= HEAD
FOR ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
SHELL := bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Python keeps the bytecode of this project's modules: without it each process of the tests compiles all of them again.
unexport PYTHONDONTWRITEBYTECODE
python_files := src tests docs workflow/scripts
# The files that took longest (tests/durations.json) begin first.
pytest_in_parallel := OMP_NUM_THREADS=1 python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder
tests_of_extras := $(patsubst %,tests/unit/test_%.py,text_transformers metrics_prompted data_huggingface data_lmdb tuning arrays array_files adamw_8bit synthesis executors) \
	$(patsubst %,tests/reliability/test_%.py,faulty_store machines)
with_extras := PYTHONPATH=$(CURDIR)/.venv/extras OMP_NUM_THREADS=1
with_arguments := $(patsubst %,tests/bench/bench_%.py,duplicates formats images inpainting judge traces)
snakefiles := Snakefile workflow/Snakefile workflow/rules

.PHONY: help demo test test-all lint docs format test-extras test-slurm submit test-gpu first-gpu wheels test-photographs bench peers entry bench-gpu soak soak-machines test-long mutants unchanged ui lock clean

help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1 \t/p' Makefile | expand -t 14

demo: .venv/.ready ## the whole pipeline on the embedded images, five to nine minutes on two cores
	snakemake --cores all --config 'experiments=[demo]'

test: .venv/.ready ## what a change needs first: unit, parity, a small workflow, a kill of each system
	IMAGE_DIFFUSION_KILLS=1 $(pytest_in_parallel) -m 'smoke or not slow'

test-all: .venv/.ready ## every test that needs no cluster, no GPU and no network, but for the long ones: RECORD=tests/durations.json records durations
	$(pytest_in_parallel) --hypothesis-profile=full $(if $(RECORD),--record-durations=$(RECORD))

lint: docs ## style, types, imports, rules, spelling, links, words, documentation
	ruff check $(python_files)
	ruff format --check $(python_files)
	mypy
	lint-imports
	snakefmt --check $(snakefiles)
	snakemake --lint
	git ls-files -z | xargs --null codespell
	python -m pytest tests/unit/test_links.py tests/unit/test_architecture.py tests/unit/test_words.py

docs: .venv/.ready ## the documentation's site, into site/: no network; a link that leads nowhere is an error
	sphinx-build --fail-on-warning --keep-going --quiet docs site
	@printf '\n%-10s %s\n' Site site/index.html

format: .venv/.ready ## put every file into the style that lint checks
	ruff check --fix $(python_files)
	ruff format $(python_files)
	snakefmt $(snakefiles)

test-extras: .venv/.extras ## the tests of what the optional extras bring: text encoders, Hugging Face's data sets, LSUN's databases, LoRA, 8-bit Adam, Croissant, executors of clouds, S3
	$(with_extras) python -c 'import bitsandbytes, datasets, imagecodecs, lmdb, kubernetes, mlcroissant, nibabel, peft, pydicom, s3fs, sentencepiece, transformers'
	$(with_extras) python -m pytest $(tests_of_extras)

test-slurm: .venv/.ready ## the tests on a real Slurm, started on this machine (apt-get install slurm-wlm munge): CLUSTERS=2 at once, SOAK= without the long ones
	OMP_NUM_THREADS=1 python -m pytest tests/slurm $(SOAK) --numprocesses=$(CLUSTERS) --dist=loadfile

submit: .venv/.ready ## Snakemake for the cluster as a small job of its own, which survives a logout: SBATCH="--time=7-0"
	mkdir -p logs
	sbatch --job-name=image-diffusion --comment=head --cpus-per-task=2 --mem=8G --output=logs/submit-%j.log $(SBATCH) \
		--wrap "exec snakemake --cores all --profile slurm"

test-gpu: .venv/.ready ## the tests that need a GPU, in nine minutes at most
	OMP_NUM_THREADS=1 timeout 540 python -m pytest tests/gpu --numprocesses=4

first-gpu: ## the first hour on a GPU: checks, tests, benchmarks, kills, told after every step: SLICE=1, 2 or 3
	$(PYTHON) tests/gpu/first_hour.py $(if $(SLICE),--slice $(SLICE))

wheels: .venv/.ready ## packages for a machine without network that has PyTorch: FOR=3.12 HAVE=pip-freeze.txt
	python workflow/scripts/wheels.py --python $(FOR) $(if $(HAVE),--have $(HAVE)) --output wheels

test-photographs: .venv/.ready ## the tests on photographs that you bring: DATA=folder of imagenet-240.tar, cifar10-20k.tar
	IMAGE_DIFFUSION_DATA=$(DATA) python -m pytest tests/bench

bench: .venv/.ready ## speed and memory, measured: every benchmark that needs no images or trainings of yours
	for each in $(filter-out $(with_arguments),$(wildcard tests/bench/bench_*.py)); do python $$each || exit 1; done

peers: .venv/.peers ## this project beside others, measured, as docs/peers.md: three hours of one core (apt-get install ffmpeg): IMAGES=folder
	OMP_NUM_THREADS=1 python tests/bench/peers/run.py $(if $(IMAGES),--images '$(IMAGES)')

entry: .venv/.ready ## an entry of docs/leaderboard.md, three seeds of one core: TRACK=digits EXPERIMENT=mine NOTE="what it is" IMAGES=folder
	OMP_NUM_THREADS=1 python tests/bench/leaderboard.py --track '$(TRACK)' --experiment '$(EXPERIMENT)' --note '$(NOTE)' \
		$(if $(IMAGES),--images '$(IMAGES)') $(if $(OUTPUT),--output '$(OUTPUT)')

bench-gpu: .venv/.ready ## what one GPU does, as a table in tests/bench/RESULTS.md
	python tests/gpu/bench_gpu.py --results tests/bench/RESULTS.md

soak: .venv/.ready ## hours of kills, damage, edits, full disks and wrong clocks: SEED=1 MINUTES=120
	python tests/reliability/soak.py --seed $(SEED) --minutes $(MINUTES)

soak-machines: .venv/.extras ## machines that are killed with their disks, one bucket: SEED=1 KILLS=200 FAULTS=1000
	$(with_extras) python tests/reliability/machines_soak.py --seed $(SEED) --kills $(KILLS) --faults $(FAULTS)

test-long: .venv/.ready ## the tests of reliability at length (500 kills in place of 120), and the long ones of all others
	IMAGE_DIFFUSION_KILLS=500 python -m pytest tests/reliability --soak
	$(pytest_in_parallel) tests/unit tests/workflow --soak -m long

mutants: .venv/.ready ## break the code in small ways, and see which of them no test notices: NUMBER=350 SEED=1 MARKS='not slow'
	OMP_NUM_THREADS=1 python tests/mutants.py --number $(NUMBER) --seed $(SEED) --marks '$(MARKS)'

unchanged: .venv/.ready ## compare the bytes of weights, samples and metrics with those of another commit: BASE=main
	python tests/unchanged.py --base $(BASE)

ui: .venv/.ready ## review every run in MLflow
	sh workflow/scripts/ui.sh

lock: .venv/.ready ## pin the newest packages that envs/requirements.in and the optional extras allow
	uv pip compile --python-version 3.11 --upgrade --generate-hashes --no-header --no-annotate --quiet \
		--output-file envs/requirements.lock envs/requirements.in
	sed --in-place '1i # Made by `make lock` from envs/requirements.in: every package the project uses, pinned, with hashes.' \
		envs/requirements.lock
	uv pip compile --python-version 3.11 --upgrade --generate-hashes --no-header --no-annotate --quiet \
		--all-extras --constraint envs/requirements.lock \
		$$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' envs/requirements.lock) \
		--output-file envs/extras.lock pyproject.toml
	sed --in-place '1i # Made by `make lock` from the extras of pyproject.toml: what they add to requirements.lock.' \
		envs/extras.lock
	uv pip compile --python-version 3.11 --upgrade --generate-hashes --no-header --no-annotate --quiet \
		--constraint <(sed -n 's/^\(torch\|torchvision\|pillow\)==\([^ ]*\).*/\1==\2/p' envs/requirements.lock) \
		--output-file envs/peers.lock envs/peers.in
	sed --in-place '1i # Made by `make lock` from envs/peers.in: what `make peers` measures the project beside, in an environment of its own.' \
		envs/peers.lock

clean: ## delete the environment; results stay
	rm -rf .venv

# uv installs what is locked in seconds; pip does the same in minutes where uv cannot be had. Both compile it too: where
# Python may write nothing later (a site's folder, PYTHONDONTWRITEBYTECODE), every start would compile again, for seconds.
.venv/.ready: envs/requirements.lock pyproject.toml setup.py src/image_diffusion/core/random/philox.c src/image_diffusion/data/crop/resize.c src/image_diffusion/data/sources/entries.c
	$(PYTHON) -m venv .venv
	sed -n '/^uv==/,/[^\\]$$/p' envs/requirements.lock > .venv/uv.txt
	{ .venv/bin/python -m pip install --quiet --require-hashes --requirement .venv/uv.txt \
		&& .venv/bin/uv pip install --compile-bytecode --python .venv/bin/python --require-hashes \
			--requirement envs/requirements.lock --quiet; } \
		|| .venv/bin/python -m pip install --require-hashes --requirement envs/requirements.lock
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	.venv/bin/python -m image_diffusion configure --schema workflow/schemas/experiment.schema.json
	touch .venv/.ready

# Beside the packages of the lock, not among them: what runs without the extras is tested without them.
.venv/.extras: envs/extras.lock .venv/.ready
	uv pip install --quiet --target .venv/extras --no-deps --require-hashes --requirement envs/extras.lock
	touch .venv/.extras

# An environment of its own: some of the peers need older packages than the project.
.venv/.peers: envs/peers.lock .venv/.ready
	$(PYTHON) -m venv .venv/peers
	uv pip install --quiet --python .venv/peers/bin/python --require-hashes --requirement envs/peers.lock
	touch .venv/.peers
