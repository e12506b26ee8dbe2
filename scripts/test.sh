#!/usr/bin/env bash
# Runs every check of the project on a CPU: style, types and import contracts, unit and contract tests, kernels in
# interpreted mode, and the end-to-end tests with real Ray and vLLM.
#
#   scripts/test.sh             scripts/test.sh --fast    (without the end-to-end tests)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FAST=false
case ${1:-} in
  --fast) FAST=true ;;
  '') ;;
  *) echo "unknown option $1; the only one is --fast" >&2; exit 2 ;;
esac

scripts/setup.sh
source scripts/steps.sh
NUM_STEPS=$((5 - $([[ $FAST == true ]] && echo 1 || echo 0)))
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 WANDB_MODE=offline
PATH=$PWD/.venv/bin:$PATH

# Pages of trees are tested in a browser. Where none is found it is installed if that needs no question (Debian or Ubuntu
# as root, 20 s); else those tests are skipped and say so.
browser() {
  local name
  for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && { echo "$name is there"; return; }
  done
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    timeout 60 apt-get -qq update >/dev/null 2>&1 &&
      timeout 120 apt-get -qq -y --no-install-recommends install chromium >/dev/null 2>&1 &&
      { echo "chromium installed"; return; }
  fi
  echo "no browser: its tests are skipped"
}

show "browser" browser
show "style, types and import contracts" pre-commit run --all-files --show-diff-on-failure
# Triton's interpreter must be chosen before triton is imported, so its tests have a process of their own; it is slow and
# runs beside the unit tests.
INTERP_LOG=$(mktemp)
python -m pytest -q tests/interp >"$INTERP_LOG" 2>&1 &
INTERP=$!
# `|| true`: a process that has ended cannot be killed, and a command that fails in the trap becomes the script's status.
trap 'kill $INTERP 2>/dev/null || true; rm -f "$INTERP_LOG"' EXIT
interpreted() {
  local status=0
  wait "$INTERP" || status=$?
  cat "$INTERP_LOG"
  return "$status"
}
show "unit and contract tests" python -m pytest -q tests/unit tests/contracts
show "kernels, interpreted and compiled ahead of time" interpreted
# One process a file: what Ray keeps of one cluster in a process (dashboard addresses, tokens) must not meet the next. Runs
# spend most of their time on imports, one process after the other, so two files go side by side, the longest first.
end_to_end() {
  local alone=tests/e2e/test_watchdog.py # tells a slow cluster from one that hangs
  local files=(tests/e2e/test_{runs,separate_async,engines,colocate_async,ray_job}.py) file
  for file in tests/e2e/test_*.py; do
    [[ " ${files[*]} $alone " == *" $file "* ]] || files+=("$file")
  done
  printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P 2 bash -c '
    status=0
    output=$(python -m pytest -q "$1" 2>&1) || status=$?
    printf "%s\n%s\n" "$1" "$output"
    ((status == 0)) || printf "FAILED: %s\n" "$1"
    exit "$status"' bash && echo "$alone" && python -m pytest -q "$alone"
}
if [[ $FAST == false ]]; then
  show "end-to-end tests" end_to_end
fi
