#!/usr/bin/env bash
# From a fresh clone to a small agent that learns: the environment, then the recipe arithmetic_tools.
#
#   scripts/run.sh                          the trees
#   scripts/run.sh tree.enabled=false       the same with verl's own engine; any Hydra override works
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
source scripts/steps.sh
NUM_STEPS=2
PATH=$PWD/.venv/bin:$PATH
RECIPE=recipes/arithmetic_tools

show "model, data and warm start" env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" python -m recipes.arithmetic_tools.prepare
show "reinforcement learning" "$RECIPE/run.sh" "$@"
