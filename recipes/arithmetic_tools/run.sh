#!/usr/bin/env bash
# Prepares, trains and plots; arguments are Hydra overrides, see ../launch.sh.
#
#   recipes/arithmetic_tools/run.sh trainer.total_training_steps=10
#   MODEL=path/to/Qwen3 recipes/arithmetic_tools/run.sh              a Hugging Face model of yours
#   RUN=runs/flat recipes/arithmetic_tools/run.sh tree.enabled=false  where logs and metrics go
exec "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" arithmetic_tools recipes.arithmetic_tools.prepare "$@"
