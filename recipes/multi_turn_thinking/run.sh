#!/usr/bin/env bash
# Prepares, trains and plots; arguments are Hydra overrides, see ../launch.sh for MODEL and RUN.
exec "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" multi_turn_thinking recipes.multi_turn_thinking.prepare "$@"
