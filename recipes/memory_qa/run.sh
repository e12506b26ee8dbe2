#!/usr/bin/env bash
# Prepares, trains and plots; arguments are Hydra overrides, see ../launch.sh.
#
#   recipes/memory_qa/run.sh trainer.total_training_steps=10
#   MODEL=path/to/Qwen3 recipes/memory_qa/run.sh              a Hugging Face model of yours
#   RUN=runs/flat recipes/memory_qa/run.sh tree.enabled=false  where logs and metrics go
exec "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" memory_qa recipes.memory_qa.prepare "$@"
