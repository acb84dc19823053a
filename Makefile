# Pinfold. `make run` and `make test` do all the set-up on a fresh Debian or Ubuntu with Rust.
.DEFAULT_GOAL := help
SHELL := /bin/bash

FILE ?=
PROTECT ?= revoke
WORK ?= target/run

.PHONY: help
help: ## This list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make run FILE=/path/to/file    your own file instead of the 256 MiB sample"
	@echo "  make run PROTECT=strict        static, revoke (what is used if nothing is said) or strict"

.PHONY: setup
setup:
	@scripts/setup

.PHONY: build
build: setup ## The program, target/release/pinfold
	cargo build --release --locked -p pinfold-cli

.PHONY: run
run: build ## The main job: a file crosses the whole stack and comes back the same
	@scripts/run-sample "$(FILE)" "$(PROTECT)" "$(WORK)"

.PHONY: test
test: setup ## What every change must pass: format, lints, docs, tests, no_std, the main job (minutes)
	scripts/test

.PHONY: test-all
test-all: test ## Also full sizes, every feature, counted read-modify-writes, loom, sanitizers, fuzzing, the released program
	scripts/test-all

.PHONY: bench
bench: build ## Head to head with what Pinfold replaces
	target/release/pinfold bench
	@echo; scripts/fio-beside

.PHONY: vm-test
vm-test: setup ## Real devices: NVMe controllers behind an IOMMU, in a virtual machine (QEMU, no KVM needed)
	vm/test

.PHONY: vm-test-iommufd
vm-test-iommufd: setup ## The same on a kernel with iommufd, which is built once (nine minutes)
	vm/kernel-iommufd
	vm/test --kernel iommufd

.PHONY: vm-demo
vm-demo: setup ## A file (FILE=..., else a sample) into a virtual machine's NVMe disk by VFIO and back, compared
	vm/demo "$(FILE)"

.PHONY: clean
clean: ## Removes what was built
	cargo clean
