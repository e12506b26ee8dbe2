"""Measures one update of a tree that exceeds the capacity C: relayed, in packs, in one unlimited pack, row by row.

All run the same float32 Qwen3 on the same rows, with verl's PPO loss on all response tokens (`relay_updates.py`). What
is measured begins with the model calls' plans and ends with the gradients: the optimiser step is the same for all.

    python benchmarks/relay.py [speed] [memory] [--shapes star chain ...] [--out FILE.json] [--plots FOLDER]

speed: processor seconds of one thread, all variants in turn, repetition by repetition; medians are compared. Before the
first repetition every variant runs once, and its gradients are compared with those of `one_pack`; `flat`, which is slow
and far off, is timed in that run only. Finding packs or sections is not in the times but apart (`planning_s`). The cost
model is fitted to the packs of this run, and predicts the relayed trees, which it has not seen: spine and context have
the prices of `CostModel.prior`, as parts of a token.

memory: the most bytes that torch's allocator has given out at once during an update, beyond weights and their
gradients. They are added up from the events of torch's profiler, so temporary buffers inside operators count; memory
that libraries take elsewhere does not. Relay should need 1.1 x (`pack_of_c` + store) at most, where `pack_of_c` is the
same for an ordinary pack of exactly C tokens: one row with as many scored tokens as the section that scores most.

C is the longest path in `relay`, a half and a quarter of it in `relay/2` and `relay/4`. The shapes are those of
`verl_tree.testing.synthetic`. Their lengths are divided (`tau2` by 16, `tree_search` by 4, `caterpillar` and
`tool_fan_out` by 8), so that an update takes seconds; what is shared, and how often, stays. `chain` is one row of 8 C,
which fits into no pack; `long_chain` is another, of twice the length, that only `--shapes` asks for.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from harness import Times, environment, interleave, keep_freed_memory, new_parser, write_json
from relay_updates import Update
from report_relay import draw, report
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from verl_tree.attention.hf import register
from verl_tree.cost.fit import CostFitter
from verl_tree.cost.model import Work
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.functional.memory import peak_bytes
from verl_tree.testing.synthetic import caterpillar, star, tau2, tool_fan_out, tree_search
from verl_tree.tree import TokenForest

VOCAB_SIZE = 2048
HEAD_DIM = 64
CAPACITY_PARTS = (1, 2, 4)
CHAIN_CAPACITIES = 8
"""Tokens of the chain, in capacities."""


def _chain(*, capacity: int, vocab_size: int) -> list[np.ndarray]:
    return [np.random.default_rng(0).integers(vocab_size, size=CHAIN_CAPACITIES * capacity)]


SHAPES: dict[str, Callable[..., list[np.ndarray]]] = {
    "star": partial(star, 16, prompt_len=1024, branch_len=128),
    "tau2": partial(tau2, 1, system_len=300, question_len=(3, 25), thinking_len=(3, 40), answer_len=(1, 12)),
    "tree_search": partial(tree_search, 4, prompt_len=256, step_len=(32, 128)),
    "caterpillar": partial(
        caterpillar, 12, system_len=256, question_len=(8, 64), thinking_len=(16, 256), answer_len=(8, 64)
    ),
    "tool_fan_out": partial(tool_fan_out, 6, prompt_len=256, plan_len=(4, 64), call_len=(4, 32), result_len=(8, 128)),
    "chain": partial(_chain, capacity=512),
    "long_chain": partial(_chain, capacity=1024),
}

DEFAULT_SHAPES = [name for name in SHAPES if name != "long_chain"]


def main() -> None:
    """Measure, print, write and draw."""
    options = _parse_options()
    keep_freed_memory()
    torch.set_num_threads(1)
    record = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for part in options.parts:
        record[part] = {"environment": environment(options)} | PARTS[part](_model(options), options)
        write_json(record, options.out)
    report(record)
    if options.plots:
        draw(record, folder=options.plots)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="speed, memory (default: both)")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=DEFAULT_SHAPES)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--plots", type=Path, help="draw the figures into this folder")
    options = parser.parse_args()
    options.parts = options.parts or list(PARTS)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    return options


def _model(options: argparse.Namespace) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    num_heads = options.hidden_size // HEAD_DIM
    config = Qwen3Config(
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(num_heads // 2, 1),
        head_dim=HEAD_DIM,
        intermediate_size=3 * options.hidden_size,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).train()


@dataclass(frozen=True, slots=True)
class Case:
    """The rows of one shape, and the micro-batches of every layout with the seconds that it took to find them."""

    update: Update
    forest: TokenForest
    capacity: int
    layouts: dict[str, list[TreeMicroBatch]]
    planning_s: dict[str, float]

    @classmethod
    def of_shape(cls, name: str, model: PreTrainedModel) -> Self:
        """Draw the rows and lay them out."""
        sequences = SHAPES[name](vocab_size=VOCAB_SIZE)
        forest = TokenForest.from_sequences(sequences)
        is_chain = len(sequences) == 1
        # The prompt is what all rows share. The chain is a response to one token.
        update = Update(model, sequences, prompt_len=1 if is_chain else int(forest.lcp[1:].min()))
        capacity = int(forest.sequence_lens.max()) // (CHAIN_CAPACITIES if is_chain else 1)
        find: dict[str, Callable[[], list[TreeMicroBatch]]] = {"one_pack": update.lay_out_packs}
        if not is_chain:
            find["packs"] = partial(update.lay_out_packs, capacity)
        for part in CAPACITY_PARTS:
            find[_relay_name(part)] = partial(update.lay_out_relayed, capacity // part)
        layouts, planning_s = {}, {}
        for layout, lay_out in find.items():
            started_s = time.process_time()
            layouts[layout] = lay_out()
            planning_s[layout] = time.process_time() - started_s
        return cls(update, forest, capacity, layouts, planning_s)

    def describe(self) -> dict[str, Any]:
        """Return the sizes of the forest and of every layout."""
        works = {name: sum((micro.work for micro in micros), Work()) for name, micros in self.layouts.items()}
        return {
            "capacity": self.capacity,
            "rows": self.forest.num_leaves,
            "flat_tokens": self.forest.num_flat_tokens,
            "tree_tokens": self.forest.num_tokens,
            "works": {name: asdict(work) for name, work in works.items()},
        }


def _relay_name(part: int) -> str:
    return "relay" if part == 1 else f"relay/{part}"


@contextmanager
def checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Recompute every layer in the backward pass."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def measure_speed(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Time every variant on every shape, compare their gradients, and let the cost model predict the relayed trees."""
    cases = {name: Case.of_shape(name, model) for name in options.shapes}
    fitter = CostFitter()
    records = {}
    for name, case in cases.items():
        paths = _paths(model, case, fitter)
        differences, flat = _first_round(model, paths, flat=case.update.run_flat)
        times = interleave(paths, repetitions=options.repetitions, title=f"{name}, ") | {"flat": flat}
        cpu_s = {path: each.median_cpu_s for path, each in times.items()}
        records[name] = case.describe() | {
            "cpu_s": cpu_s,
            "of_one_pack": {path: seconds / cpu_s["one_pack"] for path, seconds in cpu_s.items()},
            "gradient_difference": differences,
            "planning_s": case.planning_s,
            "cpu_times_s": {path: each.cpu_s for path, each in times.items()},
        }
        print(f"{name}: " + ", ".join(f"{path} {ratio:.2f}" for path, ratio in records[name]["of_one_pack"].items()))
    cost_model = fitter.fit()
    for name, case in cases.items():
        predicted_s = {
            layout: sum(cost_model.predict(micro.work) for micro in micros) for layout, micros in case.layouts.items()
        }
        records[name]["predicted"] = {
            layout: seconds / predicted_s["one_pack"] for layout, seconds in predicted_s.items()
        }
    error = fitter.relative_error if fitter.is_fitted else None
    return {"shapes": records, "cost_model": asdict(cost_model), "relative_error": error}


def _paths(model: PreTrainedModel, case: Case, fitter: CostFitter) -> dict[str, Callable[[], Any]]:
    """Return every variant, with `one_pack` first; the times of packs go to the fitter."""

    def update(layout: str, *, store_on_host: bool = False) -> None:
        model.zero_grad(set_to_none=True)
        micro_batches = case.layouts[layout]
        seconds = case.update.run(micro_batches, store_on_host=store_on_host)
        if layout in ("one_pack", "packs") and not model.is_gradient_checkpointing:
            for micro, micro_s in zip(micro_batches, seconds, strict=True):
                fitter.add(micro.work, seconds=micro_s)

    def checkpointed() -> None:
        with checkpointing(model):
            update("one_pack")

    return {
        **{layout: partial(update, layout) for layout in case.layouts},
        "relay_host": partial(update, "relay", store_on_host=True),
        "one_pack_checkpointed": checkpointed,
    }


def _first_round(
    model: PreTrainedModel, paths: dict[str, Callable[[], Any]], *, flat: Callable[[], None]
) -> tuple[dict[str, float], Times]:
    """Compare the gradients of all variants with those of `one_pack`, and time `flat`.

    A difference is the largest relative one of a parameter's gradient.
    """
    gradients: dict[str, list[Tensor]] = {}
    flat_times = Times()
    for path, compute in {**paths, "flat": flat}.items():
        model.zero_grad(set_to_none=True)
        with (flat_times if path == "flat" else Times()).measure():
            compute()
        gradients[path] = [parameter.grad for parameter in model.parameters()]
    references = gradients.pop("one_pack")
    differences = {
        path: max(((mine - its).norm() / its.norm()).item() for mine, its in zip(each, references, strict=True))
        for path, each in gradients.items()
    }
    return differences, flat_times


def measure_memory(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the peak of every layout on every shape, with and without gradient checkpointing."""
    return {"shapes": {name: _memory_of(Case.of_shape(name, model), model, name=name) for name in options.shapes}}


def _memory_of(case: Case, model: PreTrainedModel, *, name: str) -> dict[str, Any]:
    records: dict[str, dict[str, int]] = {}
    for layout, micro_batches in case.layouts.items():
        part = int(layout.partition("/")[2] or 1)
        for is_checkpointed in (False, True):
            path = f"{layout}_checkpointed" if is_checkpointed else layout
            print(f"{name}: {path}", file=sys.stderr, flush=True)
            with checkpointing(model) if is_checkpointed else nullcontext():
                records[path] = {"peak_bytes": _peak_bytes(model, case.update, micro_batches)}
                if layout.startswith("relay"):
                    reference = _pack_of_c(micro_batches[0], model, capacity=case.capacity // part)
                    records[path] |= {"pack_of_c_bytes": reference, "store_bytes": case.update.store_bytes}
    return case.describe() | {"layouts": records}


def _pack_of_c(relayed: TreeMicroBatch, model: PreTrainedModel, *, capacity: int) -> int:
    """Return the peak of one row of C tokens with as many scored tokens as the section that scores most."""
    num_scored = max(len(call.scored_K) for call in relayed.calls(scores_own_tokens=False).sections)
    prompt_len = max(capacity - num_scored, 1)
    row = Update(model, [np.random.default_rng(0).integers(VOCAB_SIZE, size=capacity)], prompt_len=prompt_len)
    return _peak_bytes(model, row, row.lay_out_packs())


def _peak_bytes(model: PreTrainedModel, update: Update, micro_batches: list[TreeMicroBatch]) -> int:
    """Return the most bytes allocated at once while gradients are added to those that the parameters have."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return peak_bytes(partial(update.run, micro_batches), device=model.device)


PARTS = {"speed": measure_speed, "memory": measure_memory}


if __name__ == "__main__":
    main()
