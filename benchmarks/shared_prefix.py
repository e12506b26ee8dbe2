"""Measures what sharing prompts saves over repeating them, and what a tree saves beyond (Prefix Grouper, figures 2, 3).

A random Qwen3 of two layers computes forward and backward of one group, in float32 on one core. `prefix_paths.py`
explains the paths. Per case: floating-point operations, counted (`prefix_costs.count_flops`); the peak of the memory
above weights; seconds, the paths in turn; and the distance of the gradients from those of flat rows.

- `grid`: G rows with one prompt and nothing else in common, the prompt as long as a response or longer by a ratio. The
  paper's prompts of 4,096 to 16,384 tokens are in `report_shared_prefix.py`, by formula.
- `trees`: groups as agents make them, the shapes of `verl_tree.testing.synthetic` an eighth as long.

The path `published` needs the paper's package, which is no dependency; without it the path is left out::

    pip install --target FOLDER --no-deps prefix-grouper==0.0.1.post1
    PYTHONPATH=FOLDER python benchmarks/shared_prefix.py --out docs/benchmarks/data/prefix_grouper.jsonl
    python benchmarks/report_shared_prefix.py docs/benchmarks/data/prefix_grouper.jsonl --plot docs/prefix_grouper.png

Records are written as they come; the same command goes on behind the last one.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import interleave, keep_freed_memory, new_parser
from por_log import RunLog
from por_models import new_model
from prefix_costs import count_flops
from prefix_paths import GroupRows, gradients, is_published_installed, register_published, sharing_of
from torch import Tensor
from transformers import PreTrainedModel

from verl_tree.functional.memory import peak_bytes
from verl_tree.testing.synthetic import caterpillar, star, tool_fan_out, tree_search
from verl_tree.tree import TokenForest

CPU = torch.device("cpu")
VOCABULARY = 512
GROUP_SIZES, PROMPT_LENS, RATIOS = (2, 4, 8, 16), (256, 512, 1024), (1, 4, 16)
SMALL_GRID = ((2, 4), (32,), (1, 4))
TOLERANCE = 1e-4
"""Largest relative distance of a parameter's gradient from that of flat rows, in float32."""


def group(num_rows: int, *, prompt_len: int, response_len: int) -> GroupRows:
    """Draw rows that share their prompt and nothing else."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(VOCABULARY, size=prompt_len)
    firsts = rng.permutation(VOCABULARY)[:num_rows]
    rows = [np.concatenate([prompt, [first], rng.integers(VOCABULARY, size=response_len - 1)]) for first in firsts]
    return GroupRows.of(rows, prompt_lens=np.full(num_rows, prompt_len))


def agents() -> Iterator[tuple[str, GroupRows]]:
    """Draw groups of agents, with the prompts that their docstrings tell."""
    for name, prompt_len, draw in (
        ("star", 1024, partial(star, prompt_len=1024, branch_len=(32, 256))),
        (
            "tool_fan_out",
            256,
            partial(tool_fan_out, prompt_len=256, plan_len=(4, 64), call_len=(4, 32), result_len=(8, 128)),
        ),
        ("tree_search", 128, partial(tree_search, prompt_len=128, step_len=(16, 64))),
        (
            "caterpillar",
            None,
            partial(caterpillar, system_len=256, question_len=(8, 64), thinking_len=(16, 256), answer_len=(8, 64)),
        ),
    ):
        rows = draw(seed=0, vocab_size=VOCABULARY)
        # A conversation's prompt has its first question, too: all that every trajectory has.
        common = int(TokenForest.from_sequences(rows).node_end[0]) if prompt_len is None else prompt_len
        yield name, GroupRows.of(rows, prompt_lens=np.full(len(rows), common))


class Benchmark:
    """Measures cases that the log lacks."""

    def __init__(self, log: RunLog, *, repetitions: int) -> None:
        self._log, self._repetitions = log, repetitions
        self._model: PreTrainedModel = new_model("0.5M", dtype=torch.float32, device=CPU)

    def measure(self, rows: GroupRows, paths: list[str], **case: Any) -> None:
        """Measure the paths of a case, each beside the others.

        Raises:
            RuntimeError: The gradients of a path are not those of flat rows.
        """
        if self._log.find(**case):
            return
        runs = {path: partial(gradients, self._model, rows, path=path) for path in paths}
        found: dict[str, dict[str, Any]] = {}
        flat: list[Tensor] = []
        for path, run in runs.items():
            mine: list[Tensor] = []
            flops = count_flops(lambda run=run, mine=mine: mine.extend(run()))
            flat = flat or mine
            error = max(((each - its).norm() / its.norm()).item() for each, its in zip(mine, flat, strict=True))
            if not error < TOLERANCE:
                raise RuntimeError(f"{case}, {path}: a gradient is {error:.1e} from that of flat rows")
            found[path] = {
                "num_tokens": sum(micro.layout.num_tokens for micro in rows.cut(sharing_of(path)).micro_batches),
                "flops": flops,
                "gradient_error": error,
                "peak_bytes": peak_bytes(lambda run=run: _forget(run()), device=CPU),
            }
        times = interleave(runs, repetitions=self._repetitions, title=f"{case}: ")
        for path, each in times.items():
            seconds = {"cpu_s": each.cpu_s, "wall_s": each.wall_s, "load": os.getloadavg()[0]}
            self._log.write(**case, path=path, **found[path], **seconds)


def _forget(_gradients: list[Tensor]) -> None:
    """Take gradients, so that nothing holds them."""


def main() -> None:
    """Measure all cases."""
    options = parse_options()
    keep_freed_memory()
    torch.set_num_threads(1)
    paths = ["none", "prompt", "full"]
    if is_published_installed():
        register_published()
        published = ["published"]
    else:
        print("prefix-grouper is not installed, so `published` is left out; see --help", file=sys.stderr)
        published = []
    log = RunLog(options.out, options, same=("small", "repetitions"))
    benchmark = Benchmark(log, repetitions=options.repetitions)
    group_sizes, prompt_lens, ratios = SMALL_GRID if options.small else (GROUP_SIZES, PROMPT_LENS, RATIOS)
    if "grid" in options.parts:
        for prompt_len, ratio, num_rows in itertools.product(prompt_lens, ratios, group_sizes):
            rows = group(num_rows, prompt_len=prompt_len, response_len=prompt_len // ratio)
            # Nothing is shared behind the prompts, so `full` is `prompt`.
            case = {"num_rows": num_rows, "prompt_len": prompt_len, "response_len": prompt_len // ratio}
            benchmark.measure(rows, ["none", "prompt", *published], kind="grid", **case)
    if "trees" in options.parts:
        for name, rows in agents():
            benchmark.measure(rows, paths, kind="trees", shape=name, num_rows=len(rows.sequences))


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, needed_out="file of JSON lines: results are written as they come")
    parser.add_argument("parts", nargs="*", default=["grid", "trees"], help="grid, trees (default: both)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny grid, to see that it runs")
    options = parser.parse_args()
    return options


if __name__ == "__main__":
    main()
