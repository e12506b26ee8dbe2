#!/usr/bin/env bash
# From a fresh clone to a small agent that learns: the environment, then a recipe.
#
#   scripts/run.sh                          arithmetic_tools, on trees
#   scripts/run.sh sums                     a pretrained model (93 MB more to load) on a public task; so do calculator and
#                                           textworld, with agents
#   scripts/run.sh tree.enabled=false       the same with verl's own engine; any Hydra override works
#   MODEL=smollm scripts/run.sh             that pretrained model in another recipe; a path is a model of yours
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RECIPE=arithmetic_tools
if [[ ${1:-} =~ ^[a-z_]+$ ]]; then
  RECIPE=$1
  shift
fi
if [[ ! -x recipes/$RECIPE/run.sh ]]; then
  echo "there is no recipe $RECIPE; there are $(for each in recipes/*/run.sh; do basename "${each%/run.sh}"; done | xargs)" >&2
  exit 2
fi

case $RECIPE in
  sums | calculator | textworld) MODEL=${MODEL:-smollm} ;;
esac
if [[ $RECIPE == textworld || $RECIPE == coding_agent ]]; then
  scripts/setup.sh --extra "$RECIPE"
fi
if [[ ${MODEL:-} == smollm ]]; then
  scripts/setup.sh --extra smollm
  MODEL=$(.venv/bin/python -m recipes.smollm.prepare)
  export MODEL
else
  scripts/setup.sh
fi
source scripts/steps.sh
NUM_STEPS=2
PATH=$PWD/.venv/bin:$PATH

show "model, data and warm start" env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
  python -m "recipes.$RECIPE.prepare" ${MODEL:+--model "$MODEL"}
show "reinforcement learning" "recipes/$RECIPE/run.sh" "$@"
