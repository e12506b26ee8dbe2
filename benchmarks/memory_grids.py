"""Measures the memory of an update over two grids: overlap ratios at constant flat tokens, and groups of one prompt.

    python benchmarks/memory_grids.py --out docs/benchmarks/data/memory_grids.jsonl
    python benchmarks/report_memory.py docs/benchmarks/data/memory_grids.jsonl --plot docs/memory_grids.png

The first grid is that of figure 8 of the Tree Training paper: 64 leaves and as many flat tokens at every POR. The
second is that of figure 3 of the Prefix Grouper paper: group size, prefix length, and prefix over suffix length. Its
prefixes are 32 times shorter. A small float32 Qwen3 computes the gradients on a CPU, with and without gradient
checkpointing:

- `flat`: all rows in one model call.
- `tree`: the tree in one pack. It is compared with `flat`, which also has everything in one call.
- `flat/1.5`: the rows in micro-batches of at most 1.5 longest paths.
- `packs/1.5` and `relay/1.5`: packs and sections of at most 1.5 longest paths, compared with `flat/1.5`. Where the tree
  fits into one they would be `tree`, and are left out.

A third, short grid has a large vocabulary, so that the output head is the peak. There a chunk of positions has logits
at a time, however many tokens there are.

Weights and their gradients are there before, the same on every path: `constant_bytes`, in no other number.
`held_bytes.py` says what the numbers are. Besides, a line has computed ones: `expansion_bytes`, the scores of the
(leaf, token) pairs and their gradients, and `store_bytes`, the keys and values of a relay's spine with their float32
gradients.
"""

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from harness import new_parser
from held_bytes import held_bytes
from por_log import RunLog
from por_paths import Case, NotApplicableError
from por_rows import Rows, drawn_rows
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from verl_tree.functional.memory import KeysAndValues
from verl_tree.functional.relayed import forest_calls
from verl_tree.packing import pack
from verl_tree.testing.synthetic import star
from verl_tree.tree.layout import TreeLayout

PORS = (0, 0.2, 0.4, 0.6, 0.8, 0.92)
NUM_LEAVES = 64
VOCAB_SIZE, LARGE_VOCAB_SIZE = 256, 16_384
LARGE_VOCAB_PORS = (0.4, 0.8)

GROUP_SIZES = (2, 4, 8, 16)
PREFIX_LENS = (128, 256, 512)
RATIOS = (1, 4, 16)
PATHS = ("flat", "tree", "flat/1.5", "packs/1.5", "relay/1.5")

SCORE_AND_GRADIENT_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """The rows of one point of a grid, what they are called, and the paths that compute them."""

    name: dict[str, Any]
    rows: Rows
    paths: tuple[str, ...] = PATHS
    vocab_size: int = VOCAB_SIZE


def points(*, flat_tokens: int, prefix_part: int) -> Iterator[Point]:
    """Yield the points of all grids."""
    for por in PORS:
        rows = drawn_rows(por, num_leaves=NUM_LEAVES, num_flat_tokens=flat_tokens, vocab_size=VOCAB_SIZE)
        yield Point({"grid": "overlap", "por": por}, rows)
    for prefix_len in (each // prefix_part for each in PREFIX_LENS):
        for ratio in RATIOS:
            for group_size in GROUP_SIZES:
                name = {"grid": "group", "group_size": group_size, "prefix_len": prefix_len, "ratio": ratio}
                lens = {"prompt_len": prefix_len, "branch_len": prefix_len // ratio}
                yield Point(name, Rows(star(group_size, vocab_size=VOCAB_SIZE, **lens), groups=[0] * group_size))
    for por in LARGE_VOCAB_PORS:
        rows = drawn_rows(por, num_leaves=NUM_LEAVES, num_flat_tokens=flat_tokens, vocab_size=VOCAB_SIZE)
        yield Point({"grid": "vocabulary", "por": por}, rows, ("flat", "tree"), LARGE_VOCAB_SIZE)


def new_model(vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """Make the model, with zeros as gradients.

    With few tokens in the vocabulary, as in large models with many in a pack, the MLP of a layer takes more than
    attention, and the output head less than a layer.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=vocab_size,
    )
    model = Qwen3ForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def measure(model: PreTrainedModel, point: Point, path_name: str, *, is_checkpointed: bool) -> dict[str, Any] | None:
    """Run a path and return what it held; None if it is `tree` under another name.

    Of micro-batches and packs, which run one after another, the one with the most tokens runs.
    """
    kind, _, num_paths = path_name.partition("/")
    rows, every = point.rows, point.rows.forest()
    capacity = math.ceil(float(num_paths) * int(every.sequence_lens.max())) if num_paths else None
    num_tokens, num_calls = every.num_tokens, 1
    if kind in ("flat", "packs"):
        packing = pack(rows.unshared() if kind == "flat" else every, capacity=capacity)
        num_tokens, num_calls = packing.num_tokens, len(packing.packs)
        if kind == "packs" and num_calls == 1:
            return None
        rows = _some_rows(rows, max(packing.packs, key=lambda each: each.num_tokens).leaves)
    case = Case(model, rows, micro_batch_tokens=every.num_flat_tokens)
    try:
        path = case.path({"flat": "flat/same", "packs": "tree"}.get(kind, path_name))
    except NotApplicableError:
        return None
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    held = held_bytes(path.gradients)
    gc.collect()  # the profiler leaves cycles
    found: dict[str, Any] = {
        "num_flat_tokens": every.num_flat_tokens,
        "num_tokens": num_tokens,
        "capacity": capacity,
        "num_calls": path.num_calls if kind == "relay" else num_calls,
        "peak_bytes": held.peak_bytes,
        "saved_bytes": held.saved_bytes,
        "constant_bytes": 2 * sum(weight.nbytes for weight in model.parameters()),
        "expansion_bytes": SCORE_AND_GRADIENT_BYTES * case.forest.num_flat_tokens,
        "largest": held.largest,
    }
    if kind == "relay":
        found["store_bytes"] = _store_bytes(case, capacity=capacity)
    return found


def _some_rows(rows: Rows, numbers: np.ndarray) -> Rows:
    return Rows([rows.sequences[number] for number in numbers], groups=[rows.groups[number] for number in numbers])


def _store_bytes(case: Case, *, capacity: int | None) -> int:
    size = KeysAndValues.of_model(case.model.config, dtype=torch.float32)
    num_spine_tokens = forest_calls(TreeLayout.from_forest(case.forest), capacity=capacity).num_spine_tokens
    return num_spine_tokens * size.dims * size.num_layers * (size.dtype_bytes + torch.float32.itemsize)


def main() -> None:
    """Measure what the file lacks."""
    parser = new_parser(__doc__)
    parser.add_argument("--flat-tokens", type=int, default=8192, help="of every point of the first grid")
    parser.add_argument("--prefix-part", type=int, default=1, help="divides the prefixes of the second grid")
    options = parser.parse_args()
    if options.out is None:
        parser.error("give --out FILE.jsonl: results are written as they come")
    torch.set_num_threads(1)
    log = RunLog(options.out, options, same=("flat_tokens", "prefix_part"))
    model = new_model()
    for point in points(flat_tokens=options.flat_tokens, prefix_part=options.prefix_part):
        if point.vocab_size != model.vocab_size:
            model = new_model(point.vocab_size)
        for path_name in point.paths:
            for is_checkpointed in (False, True):
                name = point.name | {"path": path_name, "is_checkpointed": is_checkpointed}
                if log.find(**name):
                    continue
                found = measure(model, point, path_name, is_checkpointed=is_checkpointed)
                if found is not None:
                    log.write(kind="memory", **name, **found)
        print(point.name, flush=True)


if __name__ == "__main__":
    main()
