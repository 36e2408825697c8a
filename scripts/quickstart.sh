#!/usr/bin/env bash
# From nothing to a judged 2-bit cache on a real language model; everything lands in quickstart-out/.
# Usage: scripts/quickstart.sh [--model PATH] [--text FILE_OR_DIR] [--context N]
#   --model    a checkpoint directory or .gguf file; default: Gemma 3 270M through its pip package
#   --text     calibration text, may be repeated; default: prose and code found in the Python installation
#   --context  tokens judged per text, default 2048
# Needs Python >= 3.12 and a package index. OSCAR_PYTHON names the interpreter, if not found by itself.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0"
  exit 0
fi
if [ ! -x .venv/bin/python ]; then
  python=$(bash scripts/find_python.sh)
  echo "creating .venv with $python"
  "$python" -m venv .venv
fi
echo "installing the project and the demo's packages (the first time takes minutes)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[demo]'
exec .venv/bin/python scripts/quickstart.py "$@"
