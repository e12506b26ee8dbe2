"""The draws of a range of seeds in the processes of one or two ranks; `tests/support/rank_scripts.py` starts it.

A draw that raises anything else than a ValueError, or hangs, ends the process: what it printed says why, and the last
line of `--lines` says which draw it was. So nothing is caught that is not understood, and no state is left of it.
"""

import argparse
import dataclasses
import faulthandler
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fuzz.combinations.drawing import Settings, Space
from tests.fuzz.combinations.outcome import Outcome

LIMIT_S = 240.0
"""A draw takes seconds. Ranks that wait for each other end after this long, with their stacks."""

Run = Callable[..., Outcome]


def level_of(name: str) -> tuple[Space, Run]:
    """Return the space of a level, and what runs a draw of it."""
    if name == "api":
        from tests.fuzz.combinations import api, api_features

        return api_features.SPACE, api.run
    from tests.fuzz.combinations import engine, engine_features

    return engine_features.SPACE, engine.run


def fixed_settings(level: str, *, ranks: int, given: Settings) -> Settings:
    """Return the settings that are not drawn."""
    return ({"ranks": ranks} if level == "engine" else {}) | given


def worst(outcomes: list[Outcome]) -> Outcome:
    """Return what became of a draw on all ranks."""
    order = ("exact", "refused", "wrong")
    return max(outcomes, key=lambda each: order.index(each.status))


def main() -> None:
    """Run the draws, and write a line when one begins and one when it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--level", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--fixed", type=json.loads, default={})
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    space, run = level_of(arguments.level)

    def note(line: dict[str, Any], *, by: int = 0) -> None:
        if rank == by:
            with arguments.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for seed in arguments.seeds:
        note({"begins": seed})
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        settings = space.draw(seed, fixed_settings(arguments.level, ranks=num_ranks, given=arguments.fixed))
        outcome = run(settings, seed=seed, words=space.words(settings))
        if outcome.status == "refused":  # if other ranks go on, they fail or hang
            note({"refused": seed, "rank": rank, "detail": outcome.detail[:300]}, by=rank)
        outcomes: list[Any] = [None] * num_ranks
        dist.all_gather_object(outcomes, outcome)
        note({"ends": seed} | dataclasses.asdict(worst(outcomes)))
    faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        arguments.out.write_text("true")


if __name__ == "__main__":
    main()
