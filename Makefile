# Serval: `make demo` shows it, `make test` tests it. Both install what they need.
# Quiet by default: one line per step; a step that fails prints its whole output.

SHELL := /bin/bash
CARGO ?= cargo
CACHE ?= .cache
# Where cargo puts what it builds.
BUILT := $(or $(CARGO_TARGET_DIR),target)
SERVAL := $(BUILT)/release/serval
# Test programs use this one, wherever cargo builds.
export SERVAL_COMPILE ?= $(abspath $(BUILT))/release/serval-compile
# The compiler of modules that is installed: beside the command, or that of the last build.
COMPILER = $(or $(wildcard $(dir $(SERVAL))serval-compile),$(SERVAL_COMPILE))
PREFIX ?= /usr/local
DESTDIR ?=

.PHONY: help command build-compiler demo demo-faces install installed-pages uninstall deb wheel absolute-prefix cuda-kernels cuda-kernels-or-not gpu-carry test-gpu bench-gpu test soak bench bench-quick bench-functions bench-build microbench ci fuzz fuzz-quick seeds litmus miri gpu-there setup setup-memcached setup-test setup-ci setup-miri build clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        build Serval and watch clients being answered by an accelerator (6 minutes the first time)"
	@echo "make demo-faces  the same with a real memcached behind the kernel (installs it)"
	@echo "make install     builds Serval and installs it in PREFIX=/usr/local; PREFIX=\$$HOME/.local needs no root. make uninstall removes it"
	@echo "make install DEBUG=1  the same with line tables, for debuggers and profilers"
	@echo "make deb         a Debian package of the same files, in target/debian"
	@echo "make wheel       the Python package with the command, in target/wheels"
	@echo "make cuda-kernels  the kernels for NVIDIA GPUs, for the next build (automatic on a machine with a GPU)"
	@echo "make test        lints, house rules and tests (under 8 minutes on 2 cores, the first time under 20)"
	@echo "make test-gpu    the cuda accelerator on this machine's GPU (5 minutes)"
	@echo "make bench-gpu   measures it there, with its baselines (10 minutes)"
	@echo "make bench       measures the rows of benches/speed.toml, for two cores, and rewrites docs/benchmarks.md (half an hour on an idle machine)"
	@echo "make bench-functions  the same for functions on the path, on four cores; benches/tenants.toml and benches/gpu.toml have the other rows"
	@echo "make bench-quick measures each of them briefly (2 minutes; not for publication)"
	@echo "make microbench  single operations: rings, framings, the dispatcher, functions"
	@echo "make soak        a mixed load for MINUTES=60: every reply checked, no memory growth"
	@echo "make fuzz-quick  every fuzz target for 30 seconds, and each against its planted bug"
	@echo "make fuzz        every fuzz target for MINUTES=60"
	@echo "make seeds       the simulator over SEEDS=1000000 seeds"
	@echo "make miri        every test of mqueue and wire under Miri (most of an hour)"
	@echo "make ci          make test and everything else: mutants, Miri, sanitizers, aarch64, nvcc, fuzzing, documents"

demo: command
	@$(SERVAL) demo

demo-faces: command setup-memcached
	@$(SERVAL) demo faces

# The sources of the build, for records: their last commit and their hash. A commit that changes neither causes no build.
BUILT_FROM = SERVAL_BUILT_FROM="$$(tools/source-tree)"

# DEBUG=1 builds with line tables, for debuggers and profilers.
ifeq ($(DEBUG),1)
export CARGO_PROFILE_RELEASE_DEBUG = line-tables-only
export CARGO_PROFILE_RELEASE_STRIP = none
endif

# The command alone. On a machine with a GPU it includes kernels for it, if nvcc is installed or can be downloaded.
command: setup $(if $(wildcard /dev/nvidiactl),cuda-kernels-or-not)
	@[ -e "$(SERVAL)" ] || echo "building (the first time takes about five minutes on 2 cores)"
	@$(BUILT_FROM) $(CARGO) build --release --quiet --package serval-cli

# The compiler of WebAssembly modules, which `serval` runs; it lies beside it. Not in one build with the command: cargo would
# put the compiler into both.
build-compiler: setup
	@$(CARGO) build --release --quiet --package serval-compile

build: command build-compiler
	@$(MAKE) --no-print-directory --silent -C lib

# The installed files work without the source tree: the command, which contains the headers of kernels; the libraries with their headers; the
# documentation, in the same folders as here, with everything that its links lead to (`cargo xtask tidy` checks that): examples without what they build, the
# records of benchmarks, and a few sources. The unit is an example in the documentation, and not in systemd's folders, because it names a user and a file that
# must exist first.
PAGES = README.md LICENSE CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md ORDERING.md SECURITY.md \
	$(sort $(wildcard docs/*.md docs/*.svg docs/*.json docs/benchmarks/*.json) $(filter-out docs/benchmarks/void/%,$(wildcard docs/benchmarks/*/*.json docs/benchmarks/*/*.svg))) \
	$(sort $(foreach kind,md toml c cpp cu h js py,$(wildcard examples/*/*.$(kind))) $(wildcard examples/*/Makefile)) \
	lib/include/serval/attach.h lib/include/serval/client.h device/include/serval/kernel.h \
	$(patsubst %,device/kernels/%.cpp,echo faces lenet scale) benches/speed.toml benches/baselines/README.md
UNIT = docs/serval.service
INTO = $(DESTDIR)$(PREFIX)
DOC = $(INTO)/share/doc/serval
# With ~ for the home directory.
SHOWN = $(patsubst $(HOME)/%,~/%,$(INTO))
# The manual pages of the command and its subcommands; a test compares the list.
MANUAL = serval.1 $(patsubst %,serval%.1,-serve -attach -demo -ask -bench -compare -check-config -reload -doctor -top -fn -fn-list -fn-attach -fn-detach -fn-command -fn-counters -fn-create -fn-destroy -fn-replace -fn-run -fn-state -fn-trace -fn-new -fn-build -fn-test -fn-bench -fn-keygen -fn-sign -fn-install -fn-verify -tenant -tenant-list -tenant-add -tenant-set -tenant-remove -transfer -transfer-ls -allreduce -kernel -kernel-build -kernel-list \
	-drop-reasons -man -completions -version)
BASH_COMPLETION = $(INTO)/share/bash-completion/completions/serval
ZSH_COMPLETION = $(INTO)/share/zsh/site-functions/_serval
FISH_COMPLETION = $(INTO)/share/fish/vendor_completions.d/serval.fish
PLACE = PREFIX=$(PREFIX) DESTDIR=$(abspath $(DESTDIR))

# Without symbols, which are a quarter of the command.
STRIPPED = $(if $(filter 1,$(DEBUG)),,-s)
# SERVAL=FILE installs that command. Under sudo the command of the last `make build` is installed: root's PATH may have no cargo, or another one, whose files
# would break the next build.
BUILT_BEFORE = $(or $(filter command,$(origin SERVAL)),$(SUDO_USER))
install: absolute-prefix $(if $(BUILT_BEFORE),,build)
	@[ -x "$(SERVAL)" ] && [ -x "$(COMPILER)" ] || { echo "there is no $(SERVAL) or no serval-compile beside it: run make build, as the user who has cargo, then make install again, or give SERVAL=FILE"; exit 1; }
	@install -d $(INTO)/bin $(DOC)/docs
	@install $(STRIPPED) -m 755 "$(SERVAL)" $(INTO)/bin/serval
	@install $(STRIPPED) -m 755 "$(COMPILER)" $(INTO)/bin/serval-compile
	@$(MAKE) --no-print-directory --silent -C lib install $(PLACE)
	@for page in $(PAGES); do install -D -m 644 $$page $(DOC)/$$page || exit 1; done
	@umask 022; $(INTO)/bin/serval man $(INTO)/share/man/man1 >/dev/null
	@umask 022; mkdir -p $(dir $(BASH_COMPLETION) $(ZSH_COMPLETION) $(FISH_COMPLETION)) && \
		$(INTO)/bin/serval completions bash >$(BASH_COMPLETION) && $(INTO)/bin/serval completions zsh >$(ZSH_COMPLETION) && \
		$(INTO)/bin/serval completions fish >$(FISH_COMPLETION)
	@sed 's|/usr/local/bin/|$(PREFIX)/bin/|' $(UNIT) >$(DOC)/$(UNIT)
	@chmod 644 $(DOC)/$(UNIT)
	@echo "installed $(SHOWN)/bin/serval ($(SERVAL) of $$(date -r "$(SERVAL)" '+%F %T')), libraries, headers and documentation"

# The documents that `make install` installs, one in a line.
installed-pages:
	@printf '%s\n' $(PAGES) $(UNIT)

# Removes files by name, and the folders of Serval if they are empty.
uninstall: absolute-prefix
	@rm -f $(INTO)/bin/serval $(INTO)/bin/serval-compile $(PAGES:%=$(DOC)/%) $(DOC)/$(UNIT) $(MANUAL:%=$(INTO)/share/man/man1/%) \
		$(BASH_COMPLETION) $(ZSH_COMPLETION) $(FISH_COMPLETION)
	@$(MAKE) --no-print-directory --silent -C lib uninstall $(PLACE)
	@cd $(DOC) 2>/dev/null && rmdir -p $(filter-out ./,$(sort $(dir $(PAGES)))) 2>/dev/null || true
	@rmdir $(DOC) 2>/dev/null || true

# A relative PREFIX would be a different folder in each Makefile and invalid in serval_client.pc; an unexpanded ~ would
# be a folder of this name. Other characters have a meaning in make, the shell or sed, so the check uses the environment.
absolute-prefix: export GIVEN_PREFIX = $(PREFIX)
absolute-prefix: export GIVEN_DESTDIR = $(DESTDIR)
absolute-prefix:
	@LC_ALL=C; [[ "$$GIVEN_PREFIX" =~ ^/[A-Za-z0-9/._+~-]*$$ ]] || \
		{ printf 'PREFIX has to be a path that begins with /, of A-Z a-z 0-9 / . _ + ~ - alone, not %s\n' "$$GIVEN_PREFIX"; exit 1; }
	@LC_ALL=C; [[ "$$GIVEN_DESTDIR" =~ ^([A-Za-z0-9/._][A-Za-z0-9/._+~-]*)?$$ ]] || \
		{ printf 'DESTDIR has to be a path of A-Z a-z 0-9 / . _ + ~ - alone, the last three not at its beginning, not %s\n' "$$GIVEN_DESTDIR"; exit 1; }

# A Debian package of the same files.
deb: build
	@SERVAL="$(SERVAL)" tools/deb

# The Python package, which has the command.
wheel: setup
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "the Python package needs Python 3.11 or later"; exit 1; }
	@rm -f $(BUILT)/wheels/serval_engine-*.whl
	@python3 python/backend/serval_build.py $(BUILT)/wheels

# The built-in kernels for NVIDIA GPUs, for the next build. Uses the installed nvcc, or downloads one.
cuda-kernels:
	@$(MAKE) --no-print-directory --silent -C device cuda-kernels

cuda-kernels-or-not:
	@[ -e device/cuda/echo.fatbin ] || echo "building the kernels for NVIDIA GPUs (fetches nvcc, 300 MB, where it is not installed)"
	@$(MAKE) --no-print-directory --silent -C device cuda-kernels >/dev/null 2>&1 || \
		echo "the kernels for NVIDIA GPUs cannot be built here, \`make cuda-kernels\` says why; going on without"

# Everything that test-gpu and bench-gpu need, in one folder that can be copied to a GPU machine without cargo, for GPUs of
# architecture GPU. Both fail on a machine without a GPU.
CARRY ?= target/gpu-carry
GPU ?= sm_90
# For the processors of that machine, which may differ from this one's.
CARRY_FLAGS ?= -O3 $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3)
gpu-carry: setup cuda-kernels
	@$(BUILT_FROM) $(CARGO) build --release --quiet --package serval-cli --bin serval
	@$(CARGO) build --release --quiet --package serval-compile
	@$(CARGO) build --release --quiet --package serval-accel --example gpu
	@$(MAKE) --no-print-directory --silent -C device gpu-programs GPU=$(GPU)
	@mkdir -p $(CARRY)
	@$(CC) -O2 -pthread -o $(CARRY)/peer benches/sockets/peer.c
	@cp examples/07_sockets/client.py $(CARRY)
	@cp $(BUILT)/release/serval $(BUILT)/release/serval-compile $(BUILT)/release/examples/gpu $(CACHE)/device/gpu_test $(CACHE)/device/gpu_hog $(CACHE)/device/*.$(GPU).cubin \
		tools/measure-sockets benches/sockets/cublas_server.py tools/gpu/sockets tools/gpu/check tools/gpu/allreduce tools/gpu/beside tools/compare-builds tools/gpu/freed tools/gpu/hazards tools/gpu/idle tools/gpu/loads tools/gpu/map tools/gpu/ingest tools/gpu/tensors tools/gpu/together tools/gpu/transfer tools/gpu/download $(CARRY)
	@rm -f $(CARRY)/serval_engine-*.whl
	@cp python/tests/gpu_rank.py $(CARRY)
	@cp python/tests_torch/gpu_rank.py $(CARRY)/torch_gpu_rank.py
	@if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		python3 python/backend/serval_build.py $(CARRY) >/dev/null; \
		else echo "the Python package needs Python 3.11: its step will be skipped"; fi
	@$(MAKE) --no-print-directory --silent -C benches/baselines all gpu BUILD=$(abspath $(CARRY)) CXXFLAGS="$(CARRY_FLAGS)" GPU=$(GPU)
	@$(MAKE) --no-print-directory --silent -C benches/ingest BUILD=$(abspath $(CARRY)) CXXFLAGS="$(CARRY_FLAGS)" GPU=$(GPU)
	@cp benches/configs/gpu.toml benches/configs/gpu-several.toml benches/configs/gpu-faces.toml benches/configs/emulated.toml benches/ingest/ingest.toml $(CARRY)
	@cp benches/gpu.toml $(CARRY)/suite.toml
	@git describe --always --dirty --abbrev=12 --exclude='*' >$(CARRY)/COMMIT 2>/dev/null || echo unknown >$(CARRY)/COMMIT
	@rm -f $(CARRY)/nvrtc.*
	@nvrtc=$$($(MAKE) --no-print-directory --silent -C device nvrtc) || { echo "NVRTC cannot be fetched: its step will be skipped"; exit 0; }; \
		for form in cubin fatbin; do $(SERVAL) kernel build device/kernels/builtin.cpp --gpu $(GPU) --compiler "$$nvrtc" \
			-o $(CARRY)/nvrtc.$$form >/dev/null || exit 1; done
	@cd $(CARRY) && strip serval gpu host_gpu echo flood peer

# An existing folder is used unchanged only if it cannot be built again.
CARRIED = $(if $(shell command -v $(CARGO)),gpu-carry)
test-gpu: gpu-there
	@$(if $(CARRIED),$(MAKE) --no-print-directory $(CARRIED))
	@tools/gpu/check test $(CARRY)

bench-gpu: gpu-there
	@$(if $(CARRIED),$(MAKE) --no-print-directory $(CARRIED))
	@tools/gpu/check bench $(CARRY)

# Runs before compilers are downloaded and anything is built.
gpu-there:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "this needs an NVIDIA GPU and its driver: nvidia-smi finds none"; exit 1; }

test: setup setup-test
	@$(CARGO) xtask ci test

ci: setup setup-test setup-ci
	@$(CARGO) xtask ci all

# The long forms of the tests of limits, then the soak. Its summary is one line of JSON.
soak: setup
	@SERVAL_LONG=1 $(CARGO) test --release --quiet --package serval-cli --test crowd --test limits
	@SERVAL_SOAK_MINUTES=$(MINUTES) $(CARGO) test --release --quiet --package serval-cli --test soak -- --nocapture

# Runs the simulator with that many seeds.
SEEDS ?= 1000000
seeds: setup
	@$(CARGO) build --profile fast --quiet --package serval-sim
	@$(BUILT)/fast/serval-sim --seeds $(SEEDS) --coverage

# Searches for outcomes that the memory model forbids, in millions of rounds between two processes.
ROUNDS ?= 10000000
litmus: build
	@$(SERVAL) doctor --litmus --rounds $(ROUNDS)

# All tests of the rings and the codecs in an interpreter that detects undefined behaviour.
miri: setup setup-miri
	@rustup run nightly cargo miri --version >/dev/null 2>&1 || { echo "this needs Miri: rustup toolchain install nightly --component miri,rust-src"; exit 1; }
	@$(CARGO) xtask miri

# Minutes for each target; one target runs per core.
MINUTES ?= 60
fuzz: setup
	@$(CARGO) xtask fuzz $$(($(MINUTES) * 60))

fuzz-quick: setup
	@$(CARGO) xtask fuzz 30
	@$(CARGO) xtask fuzz --planted

# Measures the rows for two cores, then writes the page, also if a verdict is a failure. The other suites need more cores or a GPU.
bench: bench-build
	@$(SERVAL) compare --suite benches/speed.toml; status=$$?; $(CARGO) xtask benchmarks && exit $$status

bench-quick: bench-build
	@$(SERVAL) compare --suite benches/speed.toml --quick

# Functions on the path against servers without them: needs four cores, libcoap3-dev, libssl-dev and Node.js.
bench-functions: bench-build
	@$(MAKE) --no-print-directory --silent -C benches/baselines coap
	@$(CARGO) build --release --quiet --package serval-bench --example cache_rate
	@$(SERVAL) compare --suite benches/functions.toml --server-core 0,2 --client-core 1; status=$$?; $(CARGO) xtask benchmarks && exit $$status

bench-build: build setup-memcached
	@$(MAKE) --no-print-directory --silent -C benches/baselines
	@$(CARGO) build --release --quiet --package serval-mqueue --example ring_rate

# Microbenchmarks of single operations; ARGS has arguments of criterion, for example ARGS=ring/doorbell.
microbench: setup
	@$(CARGO) bench --quiet --package serval-benches -- $(ARGS)
	@$(CARGO) run --quiet --release --package serval-accel --example hop
	@$(CARGO) run --quiet --release --package serval-mqueue --example ring_rate
	@$(MAKE) --no-print-directory -C device/models bench

# The requirements of every build.
setup:
	@command -v $(CARGO) >/dev/null || { echo "Serval needs Rust 1.95 or later: install it from https://rustup.rs, then run make again."; exit 1; }
	@pkg-config --exists libzstd 2>/dev/null || tools/install-packages pkgconf libzstd-dev || { echo "Serval needs pkg-config and libzstd with its headers: install them (apt-get install pkgconf libzstd-dev), then run make again."; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || tools/install-packages g++ || { echo "Serval needs a C++ compiler for its kernels: install g++ (apt-get install g++), then run make again."; exit 1; }

# The database of the faces demo and of the benchmark rows with faces.
setup-memcached:
	@tools/install-packages memcached

# Real peers for the tests: stock clients and servers from Debian's packages. Tested on Debian 12; names that differ in Debian 13 and Ubuntu are given as
# well, and are not tested there.
setup-test:
	@tools/install-packages memcached sockperf dnsmasq-base dnsperf libmemcached-tools nginx-light curl vsftpd python3-venv clang clang-format lld libssl-dev libacl1 libcap2 libcrypt1 'libhiredis1.1.0|libhiredis0.14' libidn2-0 'libmemcachedutil2t64|libmemcachedutil2' libpam0g libpcre2-posix3 openssl
	@# Debian's packages of proftpd and vsftpd exclude each other.
	@tools/unpack-package proftpd-core target/packages/proftpd
	@# Java that runs a program from its source.
	@command -v javac >/dev/null || tools/install-packages 'openjdk-17-jdk-headless|openjdk-21-jdk-headless|default-jdk-headless'
	@# The server of examples/09_coap_auth, and an unmodified server of the tests.
	@command -v node >/dev/null || tools/install-packages nodejs
	@# Without this package one test is skipped with a message.
	@-tools/install-packages strace

# The requirements of the steps of `make ci`.
setup-ci: setup-miri
	@# Without these packages one step is skipped with a message.
	@-tools/install-packages gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
	@# Nor without these: the targets for wasm32 and aarch64.
	@command -v rustup >/dev/null || exit 0; for target in wasm32-unknown-unknown aarch64-unknown-linux-gnu; do \
		[ -e "$$(rustc --print target-libdir --target $$target)" ] || rustup --quiet target add $$target >/dev/null 2>&1 || \
		echo "the target $$target cannot be installed here: \`rustup target add $$target\` says why"; \
	done

# Miri, and the nightly toolchain of the sanitizers. Without them the steps that need them are skipped with a message.
setup-miri:
	@command -v rustup >/dev/null && ! rustup run nightly cargo miri --version >/dev/null 2>&1 || exit 0; \
		rustup --quiet toolchain install nightly --profile minimal --component miri,rust-src >/dev/null 2>&1 || \
		echo "Miri cannot be installed here: \`rustup toolchain install nightly --component miri,rust-src\` says why"

clean:
	@$(CARGO) clean --quiet
	@rm -rf $(CACHE)
