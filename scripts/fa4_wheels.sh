#!/usr/bin/env bash
# Builds .fa4/site.tar.xz: flash-attn-4 and what it needs, for a machine without a network (Linux x86-64, Python 3.12,
# CUDA 13). scripts/gpu_check.sh unpacks it. Needs a network, pip and 2.5 GB of memory; takes about 5 minutes, mostly xz.
#
#   scripts/fa4_wheels.sh
#   mkdir SITE && python3 -m tarfile -e .fa4/site.tar.xz SITE
#   export PYTHONPATH=SITE:SITE/nvidia_cutlass_dsl/dsl_packages      # what a .pth file does in an environment
#
# The versions are one of the tested combinations of verl_tree/attention/fa4.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
CUTLASS_DSL=4.8.1
WHEELS=(
  flash-attn-4==4.0.0b36
  quack-kernels==0.6.5
  apache-tvm-ffi==0.1.15.post2
  einops==0.8.2
  nvidia-cutlass-dsl"==$CUTLASS_DSL"
  nvidia-cutlass-dsl-libs-base"==$CUTLASS_DSL"
  nvidia-cutlass-dsl-libs-core"==$CUTLASS_DSL"
  nvidia-cutlass-dsl-libs-cu13"==$CUTLASS_DSL"
)
# No kernel needs these: a profiler, and the files for compiling extensions in C++. (tvm_ffi links against its library
# for tests, so that one stays.)
UNNEEDED=(
  nvidia_cutlass_dsl/dsl_packages/iket
  nvidia_cutlass_dsl/cu13/{include,lib/stubs,lib/libcuda_dialect_runtime_static.a}
  tvm_ffi/{3rdparty,cython,include,share,src,CMakeLists.txt}
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
  platforms+=(--platform "${tag}_x86_64")
done
"$PYTHON" -m pip download -q --no-deps --pre --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" -d "$work/wheels" "${WHEELS[@]}"

# A wheel is a zip file. pip would refuse to install for another version of Python than its own.
for wheel in "$work"/wheels/*.whl; do
  "$PYTHON" -m zipfile -e "$wheel" "$work/site"
done
for path in "${UNNEEDED[@]}"; do
  [[ -e $work/site/$path ]] || { echo "$path is not in the wheels: look at UNNEEDED again" >&2; exit 1; }
  rm -r "${work:?}/site/$path"
done

mkdir -p .fa4
# Names in order and no times or owners: the same wheels make the same archive.
tar c -C "$work/site" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner . |
  xz --x86 --lzma2=preset=9e,dict=192MiB >"$work/site.tar.xz"
mv "$work/site.tar.xz" .fa4/site.tar.xz
echo ".fa4/site.tar.xz: $(stat -c %s .fa4/site.tar.xz | awk '{printf "%.1f", $1 / 1e6}') MB"
