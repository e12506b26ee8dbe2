"""Measures the speed-up of training on trees over the overlap ratio (POR), the paper's figure 8, on one device.

Needs no verl. A random-weight Qwen3 computes forward and backward of one update on the rows of a drawn tree: the same
number of leaves and of flat tokens at every POR (`verl_tree.testing.synthetic.overlap`); on trees as agents make them
(`--shapes`); and on the rows of files of stored trees (`--stored`). Compared are the whole tree, packs and sections
under a capacity of some longest paths, and flat rows (`por_paths.py` explains each). All recompute their layers in the
backward pass (gradient checkpointing), or none (`--no-checkpointing`), and use the same log-prob code.

    python benchmarks/por.py --device cuda --out por.jsonl --seconds 480 [--models 1.7B,8B,0.6B,4B]
    python benchmarks/por.py --device cpu --out por.jsonl --seconds 600 --models 7M --flat-tokens 8192
    python benchmarks/por.py --device cpu --out por.jsonl --models 7M --pors '' --stored trees/*.parquet
    python benchmarks/por.py --device cpu --out memory.jsonl --models 0.3M --memory --flat-kernels same
    python benchmarks/report_por.py por.jsonl [--plot por.png]

Every run is a line of JSON, written at once, so a benchmark that is killed keeps what it had. One that finds its file
goes on where the file ends. The most valuable points come first: POR .8 with the whole tree of all models, errors, the
other PORs, the capacities. The paths of a point take turns. A path that does not fit in memory is a result, too.

- Times are those of gradients alone; with `--with-step` also of an optimiser step (models up to 4B; torch's AdamW,
  whose states have the dtype of the weights). A run that would not end within `--seconds` is not begun.
- A path warms up with its first model call.
- `peak_bytes` is what a run allocates above `held_bytes`, which it finds: weights, and states of the optimiser. It is
  measured on CUDA only.
- With `--memory` every path runs once, without and with gradient checkpointing, flat rows all in one call, and its peak
  above weights and gradients is measured; on a CPU by torch's profiler, so temporary buffers inside operators count.
  Such a record has also what is known of the peak: `expansion_bytes`, the scores of the (leaf, token) pairs and their
  gradients, and `store_bytes`, a relay's keys and values with their float32 gradients.
- `flops` is `por_models.model_flops` of what the path computes; `mfu` is that over the time and the device's peak.
- Flat rows cost nearly the same at every POR: only their lengths differ, and so their FLOPs, by .3 % (8B) to 1.4 %
  (0.6B). So on CUDA they run at the first POR only (`--flat-pors`).
- Errors: gradients and log-probs of every path on a copy with 2 layers, against a float32 copy of the same weights that
  runs row by row with transformers' own attention and logits.
"""

import argparse
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from flat_attention import default_kernels
from harness import add_device_options, keep_freed_memory, new_parser
from por_log import RunLog
from por_models import SIZES
from por_rows import SHAPES, shape_rows, stored_rows
from por_runs import MEMORY_KINDS, Benchmark, Point

from verl_tree.packing import METHODS

HEADLINE_POR = 0.8
SHAPE_VOCABULARY = 1024
SMALL: dict[str, Any] = {"models": "tiny", "pors": "0,0.8", "capacities": "1.5", "repetitions": 1}
SMALL |= {"leaves": 16, "flat_tokens": 1024, "micro_batch_tokens": 256}
SAME_WHEN_RESUMED = (
    "device",
    "dtype",
    "leaves",
    "flat_tokens",
    "micro_batch_tokens",
    "threads",
    "backend",
    "with_step",
    "no_checkpointing",
)


def main() -> None:
    """Measure one point after another, until all are measured or the time is over."""
    options = parse_options()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("verl_tree.attention").setLevel(logging.INFO)  # which kernel was chosen, and why not another
    if options.device == "cpu":
        keep_freed_memory()
        torch.set_num_threads(options.threads)
    benchmark = Benchmark(options, RunLog(options.out, options, same=SAME_WHEN_RESUMED))
    for point in points(options):
        benchmark.measure(point)


def parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__, needed_out="file of JSON lines: results are written as they come")
    add_device_options(parser, seconds=480.0)
    parser.add_argument("--models", default="1.7B,8B,0.6B,4B", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--pors", default="0,0.2,0.4,0.6,0.8,0.92", help="of drawn trees; '' for none")
    parser.add_argument("--stored", nargs="*", default=[], help="files of stored trees")
    parser.add_argument("--shapes", nargs="*", default=[], choices=list(SHAPES), help="trees as agents make them")
    parser.add_argument("--memory", action="store_true", help="measure peaks in place of times and errors")
    parser.add_argument("--capacities", default="4,2,1.5", help="of packs and sections, in longest paths; '' for none")
    parser.add_argument("--methods", default="heuristic", help=f"that make packs, of {', '.join(METHODS)}")
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--flat-tokens", type=int, default=131_072)
    parser.add_argument("--micro-batch-tokens", type=int, default=32_768, help="most tokens of a call of flat rows")
    parser.add_argument(
        "--error-tokens", type=int, default=16_384, help="most flat tokens where errors are measured; 0: none"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="timed runs of a path, after one to warm up")
    parser.add_argument("--backend", default="auto", help="attention backend of trees and of flat/same")
    parser.add_argument("--flat-kernels", help="comma-separated: same, varlen, fa4, sdpa")
    parser.add_argument(
        "--flat-pors", help="where flat rows run (default on CUDA: at the first point; on a CPU: always)"
    )
    parser.add_argument("--with-step", action="store_true", help="with a step of the optimiser")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for the MFU; known for some GPUs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on a CPU")
    if parser.parse_args().small:
        parser.set_defaults(**SMALL)
    options = parser.parse_args()
    options.models = options.models.split(",")
    if unknown := set(options.models) - set(SIZES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; choose from {', '.join(SIZES)}")
    options.methods = options.methods.split(",")
    if unknown := set(options.methods) - set(METHODS):
        parser.error(f"no such packing method: {', '.join(sorted(unknown))}; choose from {', '.join(METHODS)}")
    is_cuda = options.device == "cuda"
    options.dtype = options.dtype or ("bfloat16" if is_cuda else "float32")
    options.flat_kernels = (options.flat_kernels or ",".join(["same", *default_kernels(options.device)])).split(",")
    options.pors, options.capacities = _numbers(options.pors), _numbers(options.capacities)
    if options.flat_pors is None:
        options.flat_pors = [_headline(options)] if is_cuda else options.pors
    else:
        options.flat_pors = _numbers(options.flat_pors)
    return options


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",") if each]


def _headline(options: argparse.Namespace) -> float | None:
    return min(options.pors, key=lambda por: abs(por - HEADLINE_POR), default=None)


def points(options: argparse.Namespace) -> Iterator[Point]:
    """Return all points, the most valuable first."""
    flat = tuple(f"flat/{kernel}" for kernel in options.flat_kernels)
    limited = tuple(
        f"{kind}/{each:g}"
        for each in options.capacities
        for kind in (*options.methods, "relay")
        if kind == "relay" or each >= 1  # a pack has whole paths
    )
    if options.memory:
        yield from _memory_points(options, ("tree", *flat, *limited))
        return
    for path in map(Path, options.stored):
        por = round(stored_rows(path).forest().potential_overlap_ratio, 3)
        yield from (Point(model, por, ("tree", *flat), stored=path) for model in options.models)
    for shape, model in itertools.product(options.shapes, options.models):
        yield Point(model, _shape_por(shape), ("tree", *flat, *limited), shape=shape)
    headline = _headline(options)
    if headline is None:
        return
    others = sorted(set(options.pors) - {headline}, reverse=True)

    def whole(model: str, por: float) -> Point:
        return Point(model, por, ("tree", *flat) if por in options.flat_pors else ("tree",))

    yield from (whole(model, headline) for model in options.models)
    if options.error_tokens:
        yield from (Point(model, headline, ("tree", *flat, *limited), kind="errors") for model in options.models)
    yield from (whole(model, por) for model in options.models for por in others)
    if limited:  # at POR 0 there is nothing that a capacity could part
        sharing = [por for por in (headline, *others) if por > 0]
        yield from (Point(model, por, limited) for por in sharing for model in options.models)


def _memory_points(options: argparse.Namespace, paths: tuple[str, ...]) -> Iterator[Point]:
    for model in options.models:
        for por in options.pors:
            yield from (Point(model, por, paths, kind=kind) for kind in MEMORY_KINDS)
        for shape in options.shapes:
            yield from (Point(model, _shape_por(shape), paths, kind=kind, shape=shape) for kind in MEMORY_KINDS)


def _shape_por(shape: str) -> float:
    return round(shape_rows(shape, vocab_size=SHAPE_VOCABULARY).forest().potential_overlap_ratio, 3)


if __name__ == "__main__":
    main()
