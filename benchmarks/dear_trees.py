"""A trajectory that is dearer than a rank's share: ways to spread it over ranks, simulated. JSON.

The steps are those of `scale.py`, the dealing is the trainer's own (`balance`), and seconds are computed from the data
sheet of an H200 for a model like Qwen3-8B (`computed_costs`). Nothing is measured.

    today     whole leaves are dealt to ranks
    chain     sections of a leaf lie on ranks, and each is one model call: a section waits for the keys and values of
              those before it, and on the way back for the gradients of those behind it. The same holds where a rank
              computes the spine again. This is a bound: all else is even, and nothing is exchanged
    teams     static teams of R ranks compute every call together (docs/ulysses.md); a team is one rank to `balance`
    dear      the same teams, but of the parts that a team is dealt only the dearest are computed together, as many as
              the cost model says; the others are dealt to its ranks and computed alone

What teams exchange is not overlapped here. `heads` is Ulysses; `context` is what one rank would get and return if it
fetched keys and values of its context instead, layer by layer, with sections that cost the same.

    PYTHONPATH=. python benchmarks/dear_trees.py --out docs/benchmarks/data/dear_trees.json
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import environment, new_parser, print_table, write_json
from scale import NUM_DRAWN, SHAPES, draw, drawn_groups, tagged_rows
from transfer_queue import KVBatchMeta

from verl_tree.cost.balance import balance
from verl_tree.cost.cuts import GroupPart, GroupTimes
from verl_tree.cost.model import WorkProfile
from verl_tree.functional.model_size import ModelSize, Sharing
from verl_tree.functional.update_time import DEVICES, computed_costs, exchanged_bytes
from verl_tree.trainer.rows.step_rows import StepRows

# (ranks, leaves, flat tokens, mini-batches), as in scale.py
CASES = (
    (64, 4_096, 268_000_000, 4),
    (512, 8_192, 268_000_000, 4),
    (512, 8_192, 268_000_000, 1),
    (4_096, 100_000, 4_000_000_000, 4),
    (4_096, 100_000, 4_000_000_000, 1),
    (4_096, 100_000, 1_000_000_000, 1),
)
TEAMS = (2, 4, 8, 16)
QWEN3_8B = ModelSize(4096, 12_288, 36, 32, 8, 128, 151_936, is_tied=False)
LINKS = {"450 GB/s": DEVICES["H200"].link_bytes_per_s, "400 Gb/s": 50e9}
"""Within a node, and between nodes."""
CHOSEN_AT = "400 Gb/s"
"""The link for which parts that a team computes together are chosen."""
COSTS = computed_costs(QWEN3_8B, DEVICES["H200"])
FORWARD = 2 / 8
"""The share of a forward in forward, recomputation and backward."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank does in a mini-batch: seconds, bytes that it sends, tokens that it computes with others and alone."""

    seconds: float = 0.0
    heads_bytes: float = 0.0
    context_bytes: float = 0.0
    together: float = 0.0
    alone: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        mine, its = ((x.seconds, x.heads_bytes, x.context_bytes, x.together, x.alone) for x in (self, other))
        return Load(*map(sum, zip(mine, its, strict=True)))


def together(part: GroupPart, profiles: Sequence[WorkProfile], *, team: int) -> Load:
    """Return what each rank of a team does for a part that all of them compute."""
    profile = profiles[part.group]
    num_tokens = profile.range_work(part.start, part.end).num_tokens
    # Attention costs the most behind a long context, so the last of equally dear sections begins near the end.
    last_context = profile.path_counts[part.start : part.end, 0].max() * math.sqrt((team - 1) / team)
    key_bytes = 2 * QWEN3_8B.key_dims * QWEN3_8B.num_layers * (2 + 2 + 4)  # forward, recomputed; float32 gradients
    return Load(
        part.cost_s / team,
        exchanged_bytes(QWEN3_8B, Sharing(team, team=team)) * QWEN3_8B.num_layers * num_tokens / team,
        float(last_context * key_bytes),
        together=num_tokens / team,
    )


def part_profile(profile: WorkProfile, part: GroupPart) -> WorkProfile:
    """Return the profile of a part as a group of its own; the first leaf pays for its path."""
    leaves = slice(part.start, part.end)
    counts = profile.cumulative_counts[part.start + 1 : part.end + 1] - profile.cumulative_counts[part.start + 1]
    counts = np.concatenate([np.zeros_like(counts[:1]), counts + profile.path_counts[part.start]])
    lcp = profile.lcp[leaves].copy()
    lcp[0] = 0
    return WorkProfile(np.arange(part.end - part.start), lcp, profile.path_counts[leaves], counts)


def team_loads(
    share: Sequence[GroupPart], profiles: Sequence[WorkProfile], *, team: int, only_dear: bool
) -> list[Load]:
    """Return the load of each rank of a team; `only_dear` chooses how many of the dearest parts are done together."""
    parts = sorted(share, key=lambda part: -part.cost_s)
    best: list[Load] = [Load()] * team
    for num_together in range(len(parts), -1, -1):
        shared = sum((together(part, profiles, team=team) for part in parts[:num_together]), Load())
        rest = parts[num_together:]
        own = [part_profile(profiles[part.group], part) for part in rest]
        dealt = balance(range(len(rest)), profiles=own, model=COSTS, rank_num_rows=[0] * team, cut_groups=True)
        loads = [
            shared + Load(part_s, alone=sum(own[part.group].range_work(part.start, part.end).num_tokens for part in of))
            for part_s, of in zip(dealt.loads_s, dealt.shares, strict=True)
        ]
        if num_together == len(parts) or slowest_s(loads, CHOSEN_AT) < slowest_s(best, CHOSEN_AT):
            best = loads
        if not only_dear:
            break
    return best


def slowest_s(loads: Sequence[Load], link: str) -> float:
    """Return the seconds of the slowest rank, with what it exchanges."""
    return max(load.seconds + load.heads_bytes / LINKS[link] for load in loads)


def simulate(name: str, mini_batches: list[list[Load]], *, even_s: float) -> dict[str, Any]:
    """Sum up a way; `even_s` is a step in which every token is computed once and all ranks have equal parts."""
    mean_s = sum(np.mean([load.seconds for load in loads]) for loads in mini_batches)
    ranks = [sum(of_rank, Load()) for of_rank in zip(*mini_batches, strict=True)]
    num_tokens = sum(rank.together + rank.alone for rank in ranks)
    return {
        "way": name,
        "slowest_over_mean": float(sum(max(load.seconds for load in loads) for loads in mini_batches) / mean_s),
        "step_over_even": {
            link: float(sum(slowest_s(loads, link) for loads in mini_batches) / even_s) for link in LINKS
        },
        "most_gb_sent": {
            "heads": max(rank.heads_bytes for rank in ranks) / 1e9,
            "context": max(rank.context_bytes for rank in ranks) / 1e9,
        },
        "together": sum(rank.together for rank in ranks) / num_tokens if num_tokens else 0.0,
    }


def run_case(num_ranks: int, num_leaves: int, num_flat_tokens: int, num_mini_batches: int) -> dict[str, Any]:
    """Plan a step in all ways."""
    drawn = [draw(SHAPES[number % len(SHAPES)], seed=number) for number in range(NUM_DRAWN)]
    groups = drawn_groups(num_leaves, num_flat_tokens, drawn=drawn, rng=np.random.default_rng(0))
    keys, tags = tagged_rows(groups)
    profiles = StepRows.fetch(KVBatchMeta(partition_id="train", keys=keys, tags=tags)).profiles(live=None)
    size = -(-len(profiles) // num_mini_batches)
    steps = [range(start, min(start + size, len(profiles))) for start in range(0, len(profiles), size)]
    even_s = sum(GroupTimes.of(each, model=COSTS).range_s(0, each.num_leaves) for each in profiles) / num_ranks

    def dealt(members: range, num: int) -> list[Sequence[GroupPart]]:
        ranks = [0] * num
        return list(balance(members, profiles=profiles, model=COSTS, rank_num_rows=ranks, cut_groups=True).shares)

    today = [[Load(sum(part.cost_s for part in share)) for share in dealt(each, num_ranks)] for each in steps]
    ways = [
        simulate("today", today, even_s=even_s),
        simulate("chain", _chains(steps, profiles, num_ranks), even_s=even_s),
    ]
    for team in TEAMS:
        shares = [dealt(each, num_ranks // team) for each in steps]
        for only_dear in (False, True):
            loads = [
                [load for of in each for load in team_loads(of, profiles, team=team, only_dear=only_dear)]
                for each in shares
            ]
            ways.append(simulate(f"{'dear' if only_dear else 'teams'} {team}", loads, even_s=even_s))
    case = {"ranks": num_ranks, "leaves": len(keys), "flat_tokens": num_flat_tokens, "mini_batches": num_mini_batches}
    return case | {"even_step_s": even_s, "ways": ways}


def _chains(steps: Sequence[range], profiles: Sequence[WorkProfile], num_ranks: int) -> list[list[Load]]:
    """Bound chains: a leaf takes a forward, then section by section recomputation and backward, so all of its time.

    Only the forward that keeps activations runs on all sections at once, and it is one more for each dear leaf.
    """
    bounds = []
    for members in steps:
        times = [GroupTimes.of(profiles[group], model=COSTS) for group in members]
        mean_s = sum(each.range_s(0, len(each.path_s)) for each in times) / num_ranks
        leaves_s = np.concatenate([each.path_s for each in times])
        mean_s += FORWARD * leaves_s[leaves_s > mean_s].sum() / num_ranks
        longest_s = max(mean_s, leaves_s.max())
        even = (mean_s * num_ranks - longest_s) / (num_ranks - 1)
        bounds.append([Load(float(longest_s)), *[Load(float(even))] * (num_ranks - 1)])
    return bounds


def main() -> None:
    """Simulate all cases, print a table and write the JSON."""
    options = new_parser(__doc__).parse_args()
    cases = [run_case(*case) for case in CASES]
    print_table(
        [
            {
                "ranks": case["ranks"],
                "mini-batches": case["mini_batches"],
                "even s": f"{case['even_step_s']:.1f}",
                "way": way["way"],
                "slowest": f"{way['slowest_over_mean']:.2f}",
                **{link: f"{over:.2f}" for link, over in way["step_over_even"].items()},
                **{f"GB {name}": f"{sent:.1f}" for name, sent in way["most_gb_sent"].items()},
                "together": f"{way['together']:.0%}",
            }
            for case in cases
            for way in case["ways"]
        ]
    )
    write_json({"environment": environment(options), "cases": cases}, options.out)


if __name__ == "__main__":
    main()
