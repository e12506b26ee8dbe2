#!/usr/bin/env bash
# What a session with a GPU should run first: the correctness matrix of every attention backend, then the timing table
# and whole-model updates. Runs from a bare checkout on Python 3.12 with torch, triton, transformers and numpy; verl, Ray
# and vLLM are not needed. Results are JSON files in $OUT (default ./gpu_check); at most 9 minutes.
#
#   OUT=results scripts/gpu_check.sh
#
# With a folder .fa4 (wheels of flash-attn-4 and what it needs, see the extra "fa4" in pyproject.toml) in the checkout,
# the set is unpacked beside it first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/steps.sh
OUT=${OUT:-$PWD/gpu_check}
PYTHON=${PYTHON:-python3}
NUM_STEPS=4
LOG=$OUT/gpu_check.log
mkdir -p "$OUT"
: >"$LOG"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

unpack_fa4() {
  [[ -d .fa4 ]] || { echo "no .fa4: the backend fa4 is not checked"; return; }
  local site=$OUT/../.fa4_site
  mkdir -p "$site"
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" .fa4/*.whl
  "$PYTHON" -c "import sys, tarfile; tarfile.open('.fa4/cu13.tar.xz').extractall(sys.argv[1])" "$site"
  export PYTHONPATH=$PYTHONPATH:$site:$site/nvidia_cutlass_dsl/dsl_packages
}

# The correctness matrix first: a timing of a wrong kernel is worth nothing.
check() { timeout 170 "$PYTHON" benchmarks/check_attention.py --seconds 140 --out "$OUT/attention_check.json"; }
layers() { timeout 200 "$PYTHON" benchmarks/attention.py --out "$OUT/attention.json"; }
models() { timeout 120 "$PYTHON" benchmarks/attention.py --model --out "$OUT/attention_models.json"; }

show "flash-attn-4" unpack_fa4
show "correctness of every backend" check
show "single layers" layers
show "whole-model updates" models
