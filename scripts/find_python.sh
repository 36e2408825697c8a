#!/usr/bin/env bash
# Prints the path of a Python >= 3.12, also one that only pyenv knows and that is not on PATH.
# OSCAR_PYTHON names one to use instead. Exits 1 with a reason when there is none.
set -euo pipefail

new_enough() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

candidates=()
[ -n "${OSCAR_PYTHON:-}" ] && candidates+=("$OSCAR_PYTHON")
for name in python3.12 python3.13 python3.14 python3 python; do
  found=$(command -v "$name" 2>/dev/null) && candidates+=("$found")
done
for root in "${PYENV_ROOT:-}" "$HOME/.pyenv" /opt/pyenv; do
  [ -n "$root" ] || continue
  for found in "$root"/versions/3.1[2-9]*/bin/python; do
    [ -x "$found" ] && candidates+=("$found")
  done
done

for python in "${candidates[@]}"; do
  if new_enough "$python"; then
    echo "$python"
    exit 0
  fi
done
echo "OSCAR-KV needs Python >= 3.12 with venv; none of these is: ${candidates[*]:-(no python found)}" >&2
exit 1
