#!/usr/bin/env bash
# Makes .venv, installs the project with everything its tests need, checks style and types, runs the suite.
# Usage: scripts/test.sh [pytest arguments]     OSCAR_PYTHON names the interpreter, if not found by itself.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/python ]; then
  python=$(bash scripts/find_python.sh)
  echo "creating .venv with $python"
  "$python" -m venv .venv
fi
# --no-compile: most of what is installed is never imported; compiling it takes longer than unpacking it.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[test]'

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright

# One worker per core; one thread each, so that the workers do not fight over the cores. (nproc obeys
# OMP_NUM_THREADS, hence the order.)
workers=$(nproc)
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
export XLA_FLAGS="${XLA_FLAGS:-} --xla_cpu_multi_thread_eigen=false"
.venv/bin/python -m pytest -n "$workers" --dist worksteal -q "$@"
