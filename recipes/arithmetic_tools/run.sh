#!/usr/bin/env bash
# Prepares, trains and plots; arguments are Hydra overrides.
#
#   recipes/arithmetic_tools/run.sh trainer.total_training_steps=10
#   MODEL=path/to/Qwen3 recipes/arithmetic_tools/run.sh              a Hugging Face model of yours
#   RUN=runs/flat recipes/arithmetic_tools/run.sh tree.enabled=false  where logs and metrics go
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RUN=${RUN:-runs/arithmetic_tools}
mkdir -p "$RUN"
RUN=$(cd "$RUN" && pwd)
FOLDER=$(python -m recipes.arithmetic_tools.prepare ${MODEL:+--model "$MODEL"})
export VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl TENSORBOARD_DIR=$RUN/tensorboard
export WANDB_MODE=${WANDB_MODE:-offline} WANDB_DIR=$RUN HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python -m verl_tree.main_ppo --config-dir recipes/arithmetic_tools/configs --config-name arithmetic_tools \
  recipe.folder="$FOLDER" trainer.default_local_dir="$RUN/checkpoints" hydra.run.dir="$RUN/hydra" "$@"
python scripts/plot_run.py "$RUN/metrics.jsonl"
