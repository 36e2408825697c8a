#!/usr/bin/env bash
# Runs small cases of every GPU kernel under compute-sanitizer: out-of-bounds accesses (memcheck) and races in
# shared memory (racecheck). Needs a GPU and compute-sanitizer; writes OUT/compute-sanitizer.md (default results/).
#   scripts/sanitize.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-results}
mkdir -p "$out"
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
command -v compute-sanitizer >/dev/null || { echo "sanitize.sh: compute-sanitizer is not installed" >&2; exit 2; }

# kernel | tests that launch it
cases='
Mosaic decode|parity_tests/test_mosaic.py -k "test_decode_on_device and 4-128 or test_decode_on_device and 7-64"
Mosaic quantize|parity_tests/test_mosaic.py -k "test_quantize_on_device and (normal_rows or all_bit_patterns)"
Mosaic append|parity_tests/test_append_mosaic.py -k "on_device"
Mosaic prefill|parity_tests/test_mosaic.py -k "test_prefill_on_device"
Triton decode|parity_tests/test_triton.py -k "TestOnGpu and test_decode_options and decode_triton"
Gluon decode|parity_tests/test_triton.py -k "TestOnGpu and test_decode_options and decode_gluon"
Triton prefill|parity_tests/test_triton.py -k "TestOnGpu and test_chunk"
Triton append and flush|parity_tests/test_triton.py -k "TestOnGpu and (append_token or flush_pages)"
'
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run() { # name, tool, pytest arguments
  local log="$logs/$1.$2"
  eval timeout "${SECONDS_PER_CASE:-240}" compute-sanitizer --tool "$2" --error-exitcode 9 \
    "$python" -m pytest -q -x -p no:cacheprovider "$3" >"$log" 2>&1
  echo "$?" >"$log.code"
}
for tool in memcheck racecheck; do
  while IFS='|' read -r name tests; do
    [ -n "$name" ] && run "$name" "$tool" "$tests" &
  done <<<"$cases"
  wait
done
{
  echo "# compute-sanitizer"
  echo
  echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader), $(date +%F), command \`scripts/sanitize.sh\`."
  echo "A row passes when its tests pass and the tool reports no error in any kernel they launch."
  echo
  echo "| kernel | tool | tests | tool's summary | |"
  echo "|---|---|---|---|---|"
  while IFS='|' read -r name _; do
    [ -n "$name" ] || continue
    for tool in memcheck racecheck; do
      log="$logs/$name.$tool"
      tests=$(grep -oE '[0-9]+ (passed|failed|skipped)[^=]*' "$log" | tail -1)
      summary=$(grep -oE '(ERROR|RACECHECK) SUMMARY.*' "$log" | tail -1)
      verdict=$([ "$(cat "$log.code")" = 0 ] && echo passed || echo "FAILED ($(cat "$log.code"))")
      echo "| $name | $tool | ${tests:-none} | ${summary:-none} | $verdict |"
    done
  done <<<"$cases"
} | tee "$out/compute-sanitizer.md"
for log in "$logs"/*.code; do
  [ "$(cat "$log")" = 0 ] || { echo "--- $log"; tail -n 40 "${log%.code}"; }
done >&2
! grep -q FAILED "$out/compute-sanitizer.md"
