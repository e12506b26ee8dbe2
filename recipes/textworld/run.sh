#!/usr/bin/env bash
# Prepares, trains and plots; arguments are Hydra overrides. ../demo/launch.sh says what MODEL and RUN do.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export MODEL=${MODEL:-smollm} PYTHONPATH=$ROOT/.venv/textworld${PYTHONPATH:+:$PYTHONPATH}
exec "$ROOT/recipes/demo/launch.sh" textworld "$@"
