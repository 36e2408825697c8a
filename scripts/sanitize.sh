#!/usr/bin/env bash
# Runs small cases of every GPU kernel under compute-sanitizer: out-of-bounds accesses (memcheck) and races in
# shared memory (racecheck). Needs a GPU and compute-sanitizer; writes OUT/compute-sanitizer.md (default results/).
#   scripts/sanitize.sh [OUT [KERNELS]]    KERNELS: only rows below that match this regular expression
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-results}
mkdir -p "$out"
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
command -v compute-sanitizer >/dev/null || { echo "sanitize.sh: compute-sanitizer is not installed" >&2; exit 2; }

# kernel | parts of the names of its launches | tests that launch it
# Only these kernels are instrumented: the reference's own would take minutes, and some of XLA's crash the tool.
cases='
Mosaic decode|oscar_|parity_tests/kernels/test_mosaic.py -k "test_decode_on_device and 4-128 or test_decode_on_device and 7-64"
Mosaic quantize|oscar_|parity_tests/kernels/test_mosaic.py -k "test_quantize_on_device and 128 and (normal_rows or all_bit_patterns)"
Mosaic append|oscar_|parity_tests/kernels/test_append_mosaic.py -k "test_unusual_states_on_device"
Mosaic prefill|oscar_|parity_tests/kernels/test_mosaic.py -k "test_prefill_on_device and 2-64-64"
Triton decode|_rotate_kernel,_stage_kernel,_merge_kernel|parity_tests/kernels/test_triton.py -k "TestOnGpu and test_decode_options and decode_triton"
Gluon decode|_rotate_kernel,_stage_kernel,_merge_kernel|parity_tests/kernels/test_triton.py -k "TestOnGpu and test_decode_options and decode_gluon"
Triton, Gluon chunk|_rotate_kernel,_history_kernel,_chunk_kernel|parity_tests/kernels/test_triton.py -k "TestOnGpu and test_chunk and (5000 or lengths2)"
Triton, Gluon quantize|_bulk_kernel|parity_tests/kernels/test_triton.py -k "TestOnGpu and test_page_pair and (64 or 256)"
Triton, Gluon sequential quantize|sequential_kernel,_bulk_kernel|parity_tests/kernels/test_triton.py -k "TestOnGpu and test_sequential_pages and 64"
Triton, Gluon append|_append_kernel|parity_tests/kernels/test_triton.py -k "TestOnGpu and append_token and 64"
'
cases=$(grep -E "^[^|]*(${2:-.})[^|]*\|" <<<"$cases")
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run() { # name, tool, parts of kernel names, pytest arguments
  local log="$logs/$1.$2" only
  only=$(printf -- '--kernel-name kernel_substring=%s ' ${3//,/ })
  for _ in 1 2 3; do # the tool itself crashes now and then
    eval timeout "${SECONDS_PER_CASE:-240}" compute-sanitizer --tool "$2" --error-exitcode 9 \
      $only "$python" -m pytest -q -x -p no:cacheprovider "$4" >"$log" 2>&1
    echo "$?" >"$log.code"
    [ "$(cat "$log.code")" = 139 ] || break
  done
}
for tool in memcheck racecheck; do
  while IFS='|' read -r name kernel tests; do
    [ -n "$name" ] && run "$name" "$tool" "$kernel" "$tests" &
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
  while IFS='|' read -r name _ _; do
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
