#!/usr/bin/env bash
# Runs every check of the project on a CPU: style, types and import contracts, unit and contract tests, kernels in
# interpreted mode, and the end-to-end tests with real Ray and vLLM.
#
#   scripts/test.sh             scripts/test.sh --fast    (without the end-to-end tests)
#   scripts/test.sh --stack verl-vllm      the tests that depend on versions, with verl's own: vLLM 0.24, torch 2.11
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
case $* in
  '') LANE=all NUM_STEPS=5 ;;
  --fast) LANE=fast NUM_STEPS=4 ;;
  '--stack verl-vllm') LANE=stack NUM_STEPS=3 VENV=.venv-verl-vllm ;;
  *) echo "unknown options $*; there are --fast and --stack verl-vllm" >&2; exit 2 ;;
esac

if [[ $LANE == stack ]]; then
  scripts/setup.sh --stack verl-vllm
else
  scripts/setup.sh
fi
source scripts/steps.sh
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 WANDB_MODE=offline
PATH=$PWD/$VENV/bin:$PATH

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

if [[ $LANE != stack ]]; then
  show "browser" browser
  show "style, types and import contracts" pre-commit run --all-files --show-diff-on-failure
fi
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
case $LANE in
  all) show "end-to-end tests" end_to_end ;;
  stack) show "engines beside verl's own" python -m pytest -q tests/e2e/test_engines.py ;;
esac
