#!/usr/bin/env bash
# Prepares, trains and plots; arguments are Hydra overrides, see ../launch.sh for MODEL and RUN.
exec "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" tree_search_reasoning recipes.tree_search_reasoning.prepare "$@"
