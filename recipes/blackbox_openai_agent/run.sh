#!/usr/bin/env bash
# Prepares (as arithmetic_tools does, and with its files), trains and plots; arguments are Hydra overrides.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
exec recipes/launch.sh blackbox_openai_agent recipes.arithmetic_tools.prepare recipe.root="$PWD" "$@"
