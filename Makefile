# Two commands matter, and both start from a bare machine with Python 3.11 or newer:
#   make demo    a cache of a real model from examples/chats.jsonl, and a small draft trained on it
#   make test    lint, types, tests (what CI runs)
# PYTHON=python3.12 picks the interpreter, VENV=dir the place of the virtual environment.

PYTHON ?= python3
VENV ?= .venv
export PYTHON VENV

.PHONY: help install model check test faults parallel demo test-floor format clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

install:
	scripts/install

model: install
	scripts/model

check: install
	scripts/check

test: check model
	scripts/test

faults: install
	scripts/faults

parallel: install
	scripts/parallel

demo: install model
	scripts/demo

test-floor: model
	scripts/test-floor

format: install
	scripts/format

clean:
	rm -rf build demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
