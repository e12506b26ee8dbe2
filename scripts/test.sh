#!/usr/bin/env bash
# Runs every check of the project on a CPU: style, types and import contracts, unit and contract tests, kernels in
# interpreted mode, and the end-to-end tests with real Ray and vLLM.
#
#   scripts/test.sh             scripts/test.sh --fast    (without the end-to-end tests)
#   scripts/test.sh --stack verl-vllm      the tests that depend on versions, with verl's own: vLLM 0.24, torch 2.11
#   scripts/test.sh --long      what the first leaves out: more whole runs, tutorials, more cases of the engines and kernels,
#                               features drawn together, extras that resolve
#   scripts/test.sh --faults    processes killed in every phase, full disks and memory, damaged checkpoints, a lost node: an hour
#   scripts/test.sh --soak      300 steps with random kills, for two trainers
#
# The last two write what they measured to runs/faults_*.xml and runs/soak.xml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
case $* in
  '') LANE=all NUM_STEPS=2 ;;
  --fast) LANE=fast NUM_STEPS=2 ;;
  '--stack verl-vllm') LANE=stack NUM_STEPS=1 VENV=.venv-verl-vllm ;;
  --long | --faults | --soak) LANE=${1#--} ;;
  *) echo "unknown options $*; there are --fast, --stack verl-vllm, --long, --faults and --soak" >&2; exit 2 ;;
esac

if [[ $LANE == stack ]]; then
  scripts/setup.sh --stack verl-vllm
else
  scripts/setup.sh --extra smollm
  scripts/setup.sh --extra veomni
  scripts/setup.sh --extra megatron
fi
if [[ $LANE == long ]]; then
  scripts/setup.sh --extra textworld
  scripts/setup.sh --extra coding_agent
fi
source scripts/steps.sh
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 WANDB_MODE=offline
PATH=$PWD/$VENV/bin:$PATH

# from_debian COMMANDS PACKAGES...: installs packages unless one of the commands is there, if that needs no question (Debian
# or Ubuntu as root, 20 s); else the tests that use them are skipped and say so. Pages of trees are tested in a browser,
# deploy/slurm.sh by SLURM.
from_debian() {
  local name
  for name in $1; do
    command -v "$name" >/dev/null && { echo "$name is there"; return; }
  done
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    timeout 60 apt-get -qq update >/dev/null 2>&1 &&
      timeout 120 apt-get -qq -y --no-install-recommends install "${@:2}" >/dev/null 2>&1 &&
      { echo "$2 installed"; return; }
  fi
  echo "no $2: its tests are skipped"
}

case $LANE in
  all | fast) show "browser" from_debian 'chromium chromium-browser google-chrome' chromium ;;
  long) from_debian slurmctld slurmctld slurmd slurm-client munge ;;
esac

# side_by_side JOBS...: runs pytest on each job, which may name several paths, in a process of its own. The job `style` is
# style, types and import contracts; `tests.fuzz.NAME` and `tests/fuzz/NAME` draw features or agents together. Ray keeps
# things of a cluster in a process (dashboard addresses, tokens) that must not meet the next, and Triton's interpreter must
# be chosen before triton is imported. Most processes use one core, so two go side by side. The slowest tests are named,
# for whoever looks for minutes to save.
side_by_side() {
  printf '%s\0' "$@" | xargs -0 -n 1 -P 2 bash -c '
    status=0
    printf "%s ...\n" "$1"
    case $1 in
      style) output=$(pre-commit run --all-files --show-diff-on-failure 2>&1) || status=$? ;;
      tests.fuzz.*) output=$(python -m $1 2>&1) || status=$? ;;
      tests/fuzz/*) output=$(python $1 2>&1) || status=$? ;;
      *) output=$(python -m pytest -q --durations=12 --durations-min=5 $1 2>&1) || status=$? ;;
    esac
    printf "%s\n%s\n" "$1" "$output"
    ((status == 0)) || printf "FAILED: %s\n" "$1"
    exit "$status"' bash
}

every_test() {
  # Those that find most faults first, then the longest, so that both places end at the same time.
  local jobs=('tests/unit tests/contracts' style tests/interp)
  local file
  # Together, as their ranks are forked from one process; tests/support/rank_scripts.py.
  jobs+=("$(echo tests/e2e/test_{engines,sft}.py)")
  jobs+=(tests/e2e/test_{runs,watchdog,ray_job}.py)
  # On one cluster; tests/e2e/conftest.py.
  jobs+=("$(echo tests/e2e/test_{portions,replay,other_rows,capture,wire,retries}.py)")
  jobs+=("$(echo tests/e2e/test_{entry,wheel}.py)")
  for file in tests/e2e/test_*.py; do
    [[ " ${jobs[*]} " == *" $file "* ]] || jobs+=("$file")
  done
  side_by_side "${jobs[@]}"
}

case $LANE in
  all) show "style, unit, contract, interpreter and end-to-end tests" every_test ;;
  fast) show "style, unit, contract and interpreter tests" side_by_side 'tests/unit tests/contracts' style tests/interp ;;
  long)
    side_by_side tests/long/test_*.py '-m long tests/unit' '-m long tests/e2e' '-m long tests/interp' \
      'tests.fuzz.combinations --level api --count 100' 'tests.fuzz.combinations --level engine --ranks 2 --count 100' \
      'tests/fuzz/capture --count 500'
    ;;
  faults)
    # The kills are two chains of runs. A job is split at its spaces, so its -k has none.
    side_by_side \
      'tests/faults/test_kills.py -k (generation)or(log_probs)or(update)or(without) --junitxml runs/faults_first.xml' \
      'tests/faults/test_kills.py -k (checkpoint)or(sync)or(validation)or(without) --junitxml runs/faults_last.xml' \
      'tests/faults/test_disks.py --junitxml runs/faults_disks.xml' \
      'tests/faults/test_hangs.py tests/faults/test_retries.py tests/faults/test_nodes.py tests/faults/test_memory.py --junitxml runs/faults_others.xml'
    ;;
  soak) python -m pytest -v tests/faults/test_soak.py --junitxml runs/soak.xml ;;
  stack)
    show "tests that depend on versions" side_by_side 'tests/unit tests/contracts' tests/interp \
      'tests/e2e/test_engines.py -k (engine[qwen3-)and(fsdp2)' '-m long tests/e2e/test_engines.py -k (engine[qwen3-)and(fsdp2)' \
      '-m long tests/unit' '-m long tests/interp' tests/long/test_weight_reload.py
    ;;
esac
