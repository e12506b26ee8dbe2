#!/usr/bin/env bash
# What a session with a GPU runs first: `correctness` of every attention backend, `layers` (times beside the best flat
# kernels), `models` (whole updates), `recurrence` (the rule of recurrent layers, checked and timed) and `engines` (an
# update on Megatron and one on VeOmni beside verl's own), each at most 8 minutes. Runs from a checkout on Python 3.12
# with torch, triton, transformers and numpy; Ray, vLLM and a network are not needed, verl by `engines` only, which says
# what it lacks. Results are JSON lines in $OUT (default ./gpu_check), written at once: a run that is killed keeps what
# it had. Without a GPU it rehearses on the CPU.
#
#   OUT=results scripts/gpu_check.sh [correctness] [layers] [models] [recurrence] [engines]      # all, in this order, by default
#   python benchmarks/report_gpu.py results                               # the tables
#
# With .fa4/site.tar.xz (scripts/fa4_wheels.sh) flash-attn-4 is unpacked beside the checkout first; else the one of the
# environment serves, if there is one. flash-linear-attention is that of the environment: without it, `recurrence` says
# so and runs torch alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-$PWD/gpu_check}
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
ulimit -c 0 # a process that dies leaves no core file

SITE=$PWD/.fa4_site
if [[ -f .fa4/site.tar.xz ]]; then
  if [[ ! -d $SITE || .fa4/site.tar.xz -nt $SITE ]]; then
    rm -rf "$SITE" "$SITE.part"
    mkdir "$SITE.part"
    "$PYTHON" -m tarfile --filter data -e .fa4/site.tar.xz "$SITE.part"
    touch "$SITE.part" # the archive has no times
    mv "$SITE.part" "$SITE"
  fi
  export PYTHONPATH=$PYTHONPATH:$SITE:$SITE/nvidia_cutlass_dsl/dsl_packages
else
  echo "no .fa4/site.tar.xz: fa4 is checked only if this environment has flash-attn-4"
fi

# With deterministic algorithms cuBLAS asks for a workspace of a fixed size.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "$PYTHON" -u benchmarks/gpu_stages.py --out "$OUT" "$@"
