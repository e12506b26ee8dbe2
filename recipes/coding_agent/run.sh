#!/usr/bin/env bash
# Prepares, trains and plots; arguments are Hydra overrides. ../demo/launch.sh says what MODEL and RUN do.
exec "$(dirname "${BASH_SOURCE[0]}")/../demo/launch.sh" coding_agent "$@"
