# Pinfold. `make run` and `make test` install what they need on a fresh Debian or Ubuntu with Rust.
.DEFAULT_GOAL := help
SHELL := /bin/bash

FILE ?=
PROTECT ?= batch
WORK ?= target/run
ACCESSES ?= 1000000000
SOAK_SECONDS ?= 60
PROFILE ?= release
PREFIX ?= /usr/local

.PHONY: help
help: ## Print this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make run FILE=/path/to/file    your own file instead of the 256 MiB sample"
	@echo "  make run PROTECT=strict        strict, revoke, batch (the default) or static"

.PHONY: setup
setup:
	@scripts/setup

.PHONY: build
build: setup ## Build the program, target/release/pinfold
	cargo build --release --locked -p pinfold-cli

.PHONY: run
run: setup ## The main job: copy a file through the whole stack and compare it
	cargo build --profile ci --locked -p pinfold-cli
	@PINFOLD=target/ci/pinfold scripts/run-sample "$(FILE)" "$(PROTECT)" "$(WORK)"

.PHONY: test
test: setup ## The checks that every change must pass: format, layers, tests, the main job (minutes)
	scripts/test

.PHONY: lint
lint: setup ## The compiler's lints, of all packages, and the core without std
	scripts/lint

.PHONY: test-lib
test-lib: setup ## The library alone (crates/): built and tested, without the tools
	scripts/test-lib

.PHONY: test-all
test-all: test ## Also lints, full sizes, every feature, counted read-modify-writes, loom, sanitizers, tests in C
	scripts/test-all

.PHONY: fuzz
fuzz: setup ## Fuzz the parsers, a minute each, with a nightly compiler (SECONDS_EACH=...)
	SECONDS_EACH=$(or $(SECONDS_EACH),60) scripts/fuzz

.PHONY: adversary
adversary: setup ## 10^9 accesses of random devices, of which none may land after its mapping is quiesced (ACCESSES=...)
	PINFOLD_ADVERSARY_ACCESSES=$(ACCESSES) cargo test --locked --profile ci -p pinfold --test adversary \
		the_stack_without_mistakes -- --nocapture

.PHONY: soak
soak: setup ## 200 threads that map and revoke for 60 s beside random devices (SOAK_SECONDS=...)
	PINFOLD_ADVERSARY_SOAK_SECONDS=$(SOAK_SECONDS) cargo test --locked --profile ci -p pinfold --test adversary \
		a_soak_of_200_threads -- --nocapture

.PHONY: soak-receive
soak-receive: setup ## 10 minutes of packets that are held, stored, and of programs that are killed (as root; SOAK_SECONDS=...)
	PINFOLD_RECEIVE_SOAK_SECONDS=$(if $(filter command line environment,$(origin SOAK_SECONDS)),$(SOAK_SECONDS),600) \
		cargo test --locked --profile ci -p pinfold-cli --test program a_soak_of_reception -- --nocapture

.PHONY: soak-serve
soak-serve: setup ## 10 minutes of clients that leave and come back, and of servers that are killed (SOAK_SECONDS=...)
	PINFOLD_SERVE_SOAK_SECONDS=$(if $(filter command line environment,$(origin SOAK_SECONDS)),$(SOAK_SECONDS),600) \
		cargo test --locked --profile ci -p pinfold-cli --test program a_soak_of_serve -- --nocapture

.PHONY: bench
bench: build ## Head to head with what Pinfold replaces
	cargo build --release --locked -p pinfold-bench
	target/release/pinfold-bench

.PHONY: instructions
instructions: setup ## Instructions per operation of the hottest paths, under valgrind, compared with the record
	@scripts/setup --instructions
	scripts/instructions

.PHONY: install
install: ## Install the program, man pages, completions, units, the C library, and the engine for fio if its headers are there (PREFIX=/usr/local, DESTDIR=...)
	PROFILE=$(PROFILE) PREFIX=$(PREFIX) DESTDIR=$(DESTDIR) scripts/install
	PROFILE=$(PROFILE) PREFIX=$(PREFIX) DESTDIR=$(DESTDIR) contrib/fio/install

.PHONY: deb
deb: setup ## Debian packages in target/deb: pinfold, libpinfold0.2, libpinfold-dev (PROFILE=ci is faster to build)
	@scripts/setup --packages
	PROFILE=$(PROFILE) scripts/deb

.PHONY: deb-test
deb-test: deb ## Install, use and purge them in clean systems, Debian 12 and 13 (as root)
	scripts/deb-test

.PHONY: foreign
foreign: setup ## Foreign programs on libpinfold (fio, DPDK, libblkio) at full length, packages on clean systems, 64-bit Arm
	@scripts/setup --clients --generator --instructions --go --packages
	scripts/foreign

.PHONY: vm-test
vm-test: setup ## Tests with devices: NVMe controllers behind an IOMMU, in a virtual machine (QEMU, no KVM needed)
	vm/test
	vm/vtd

.PHONY: vm-test-iommufd
vm-test-iommufd: setup ## The same on a kernel with iommufd, which is built once (nine minutes)
	vm/kernel-iommufd
	vm/test --kernel iommufd

.PHONY: vm-demo
vm-demo: setup ## Copy a file (FILE=..., else a sample) to the NVMe disk of a virtual machine through VFIO and back
	vm/demo "$(FILE)"

.PHONY: clean
clean: ## Remove what was built
	cargo clean
