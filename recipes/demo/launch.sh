#!/usr/bin/env bash
# recipes/demo/launch.sh RECIPE [override ...] prepares, trains and plots: what the recipes' run.sh have in common.
#
# RECIPE is a folder in recipes/ with configs/RECIPE.yaml, loops.yaml and prepare.py; overrides are Hydra's.
#   MODEL=path/to/Qwen3   a Hugging Face model of yours instead of the small one
#   MODEL=smollm          SmolLM2-135M-Instruct, after scripts/setup.sh --extra smollm
#   DATA=folder           rows of yours, for a recipe whose prepare.py takes --data
#   RUN=runs/other        where logs and metrics go, runs/RECIPE by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RECIPE=$1
shift
RUN=${RUN:-runs/$RECIPE}
mkdir -p "$RUN"
RUN=$(cd "$RUN" && pwd)
if [[ ${MODEL:-} == smollm ]]; then
  MODEL=$(python -m recipes.smollm.prepare)
fi
# One thread: the models are small, and a second thread beside other work makes their warm start several times slower.
FOLDER=$(OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m "recipes.$RECIPE.prepare" ${MODEL:+--model "$MODEL"} ${DATA:+--data "$DATA"})
export VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl TENSORBOARD_DIR=$RUN/tensorboard
export WANDB_MODE=${WANDB_MODE:-offline} WANDB_DIR=$RUN HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python -m verl_tree.main_ppo --config-dir "recipes/$RECIPE/configs" --config-name "$RECIPE" \
  recipe.root="$PWD" recipe.folder="$FOLDER" trainer.default_local_dir="$RUN/checkpoints" hydra.run.dir="$RUN/hydra" "$@"
python -m verl_tree.commands plot "$RUN/metrics.jsonl"
