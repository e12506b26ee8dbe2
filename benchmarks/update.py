"""Times one update (forward, backward, optimiser step) of the same trajectories as a tree and as flat sequences.

Three paths score the same tokens (those of the branches), sum the same loss and end with one AdamW step:

- tree: the whole forest at once;
- flat: one sequence after another with transformers' causal SDPA, gradients accumulated, and only the positions that
  the loss reads projected to the vocabulary, as the tree does;
- flat_all_logits: the same with logits at every position, what `model(input_ids).logits` and verl's own engine compute.

They are interleaved, repetition by repetition, so that a machine that slows down slows all; medians are compared. So
are the gradients: a fast wrong update is worth nothing. Two cases: `shared` (a prompt with branches) and `unrelated`
(as many sequences that share nothing, where the tree can win nothing and must not lose).

The compression (flat / tree tokens) bounds the speed-up of everything that is linear in tokens. Attention shares less:
branches still read the whole prompt. `flop_ratio` is the bound with attention and projection counted; it rises towards
the compression with the width of the model.

    python benchmarks/update.py [--out benchmark.json] [--repetitions 5] [--branches 16] ...

Freed memory is kept by the process instead of being returned to the system (`mallopt`, all paths alike): on a CPU every
large buffer would else be faulted in anew page by page, which costs up to half the speed of a matrix product and hits
larger buffers harder. A training run on a CPU wants the same: MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Times, environment, interleave, keep_freed_memory, new_parser, write_json
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, register
from verl_tree.functional import expand
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

_FLAT_PATHS = ("flat", "flat_all_logits")


def main() -> None:
    """Run the cases, print a table and write the JSON."""
    options = _parse_options()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    if options.engines:
        _run_engines(options)
        return
    cases = [_run_case(options, name=name, prompt_len=length) for name, length in _cases(options)]
    for case in cases:
        print(f"{case['case']}: compression {case['compression']:.2f}, tree {case['median_s']['tree']:.3f} s")
        for path in _FLAT_PATHS:
            print(
                f"  {path:>16} {case['median_s'][path]:8.3f} s: tree is {case['ratio'][path]:.2f}x faster "
                f"(by CPU time {case['cpu_ratio'][path]:.2f}x, by FLOPs {case['flop_ratio'][path]:.2f}x), "
                f"gradients differ by {case['max_gradient_difference'][path]:.1e}"
            )
    write_json({"environment": environment(options), "cases": cases}, options.out)


def _run_engines(options: argparse.Namespace) -> None:
    """Time the same rows through verl's own FSDP2 engine and the tree engine."""
    from engines import branches, overlapping, time_engines  # imports verl, which the other cases do without

    if options.overlap:
        num_tokens = options.branches * options.branch_len
        cases = {
            f"POR {ratio:g}": overlapping(
                ratio, vocab_size=options.vocab_size, num_leaves=options.branches, num_flat_tokens=num_tokens
            )
            for ratio in options.overlap
        }
    else:
        cases = {
            name: branches(
                vocab_size=options.vocab_size,
                prompt_len=prompt_len,
                num_branches=options.branches,
                branch_len=options.branch_len,
            )
            for name, prompt_len in _cases(options)
        }
    gates = ("auto", "never") if options.overlap else ("auto",)
    records = time_engines(_model(options), cases, repetitions=options.repetitions, gates=gates)
    for record in records:
        never = f" (gate never: {record['ratio_of_gates']['never']:.2f}x)" if options.overlap else ""
        cpu = f", by CPU time {record['cpu_ratio_of_gates']['auto']:.2f}x"
        print(
            f"{record['case']}: compression {record['compression']:.2f}, tree engine {record['tree_s']:.3f} s, verl's "
            f"engine {record['flat_s']:.3f} s ({record['flat_rows']} rows a micro-batch): {record['ratio']:.2f}x faster"
            f"{never}{cpu}, {record['packs_run_flat']} packs run flat"
        )
    write_json({"environment": environment(options), "cases": records}, options.out)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--branch-len", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--cases", nargs="+", choices=["shared", "unrelated"], default=["shared", "unrelated"])
    parser.add_argument(
        "--engines", action="store_true", help="time the rows through verl's own engine and the tree engine"
    )
    parser.add_argument(
        "--overlap", type=float, nargs="+", metavar="POR", help="with --engines: trees of these overlap ratios instead"
    )
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> list[tuple[str, int]]:
    lens = {"shared": options.prompt_len, "unrelated": 0}
    return [(name, lens[name]) for name in options.cases]


def _run_case(options: argparse.Namespace, *, name: str, prompt_len: int) -> dict[str, Any]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, options.vocab_size, prompt_len)
    branches = rng.integers(0, options.vocab_size, (options.branches, options.branch_len))
    # Without a prompt, the first token has no logits: it takes the prompt's part in both paths.
    first_scored = max(prompt_len, 1)
    sequences = [np.concatenate((prompt, branch)) for branch in branches]
    coefficients = [torch.randn(len(sequence) - first_scored) for sequence in sequences]
    model = _model(options)
    forest = TokenForest.from_sequences(sequences)
    inputs = {"coefficients": coefficients, "first_scored": first_scored}
    paths = {
        "flat": lambda: flat_gradients(model, sequences, **inputs, all_logits=False),
        "flat_all_logits": lambda: flat_gradients(model, sequences, **inputs, all_logits=True),
        "tree": lambda: tree_gradients(model, forest, **inputs),
    }
    difference = max_gradient_differences(model, paths)
    times = _time_updates(model, paths, repetitions=options.repetitions)
    flops = _flops(model, forest, num_scored=sum(map(len, coefficients)))
    return {
        "case": name,
        "compression": forest.num_flat_tokens / forest.num_tokens,
        "median_s": {path: times[path].median_s for path in paths},
        "ratio": {path: times[path].median_s / times["tree"].median_s for path in _FLAT_PATHS},
        "cpu_ratio": {path: times[path].median_cpu_s / times["tree"].median_cpu_s for path in _FLAT_PATHS},
        "flop_ratio": {path: flops[path] / flops["tree"] for path in _FLAT_PATHS},
        "max_gradient_difference": difference,
        "times_s": {path: times[path].wall_s for path in paths},
        "cpu_times_s": {path: times[path].cpu_s for path in paths},
    }


def _flops(model: PreTrainedModel, forest: TokenForest, *, num_scored: int) -> dict[str, float]:
    """Floating-point operations of each path's matrix products, forward and backward."""
    config = model.config
    per_token = 6 * sum(parameter.numel() for parameter in model.model.layers.parameters())
    per_pair = 14 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    per_logits = 6 * config.hidden_size * config.vocab_size
    flat_pairs = float((forest.sequence_lens * (forest.sequence_lens + 1) // 2).sum())
    tree_pairs = AttentionPlan.from_layout(TreeLayout.from_forest(forest)).num_visible_pairs
    flat = per_token * forest.num_flat_tokens + per_pair * flat_pairs
    return {
        "flat": flat + per_logits * num_scored,
        "flat_all_logits": flat + per_logits * forest.num_flat_tokens,
        "tree": per_token * forest.num_tokens + per_pair * tree_pairs + per_logits * num_scored,
    }


def _model(options: argparse.Namespace) -> PreTrainedModel:
    register()
    head_dim = 64
    num_heads = options.hidden_size // head_dim
    config = Qwen3Config(
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(num_heads // 2, 1),
        head_dim=head_dim,
        intermediate_size=3 * options.hidden_size,
        vocab_size=options.vocab_size,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).train()


def flat_gradients(
    model: PreTrainedModel,
    sequences: list[np.ndarray],
    *,
    coefficients: list[Tensor],
    first_scored: int,
    all_logits: bool,
) -> None:
    """Accumulate the gradients of one sequence after another; the first `first_scored` tokens are not scored."""
    model.set_attn_implementation("sdpa")
    for sequence, coefficient in zip(sequences, coefficients, strict=True):
        token_ids = torch.from_numpy(sequence).long().to(model.device)[None]
        first = 0 if all_logits else first_scored - 1
        positions = torch.arange(first, len(sequence) - 1, device=model.device)
        logits = model(input_ids=token_ids, use_cache=False, logits_to_keep=positions).logits[0].float()
        log_probs = logits.log_softmax(-1).gather(-1, token_ids[0, first + 1 :, None]).squeeze(-1)
        (coefficient * log_probs[-len(coefficient) :]).sum().backward()


def tree_gradients(
    model: PreTrainedModel, forest: TokenForest, *, coefficients: list[Tensor], first_scored: int
) -> None:
    """Compute the same gradients in one forward and backward; laying out the forest is part of the time."""
    model.set_attn_implementation(ATTENTION_NAME)
    host = TreeLayout.from_forest(forest)
    plan = AttentionPlan.from_subtree_end(host.subtree_end_T, device=model.device)
    layout = host.to(model.device)
    scores = tree_forward_log_probs(model, layout, plan=plan, wanted_T=layout.position_T >= first_scored)
    lens = np.diff(layout.leaf_offsets).tolist()
    log_probs = torch.cat([row[first_scored:] for row in expand(scores.log_probs_T, layout).split(lens)])
    (torch.cat([coefficients[leaf] for leaf in layout.leaves]) * log_probs).sum().backward()


def max_gradient_differences(model: PreTrainedModel, paths: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return, for each path but "tree", the largest relative difference of a parameter's gradient from the tree's."""
    gradients = {}
    for path, compute in paths.items():
        model.zero_grad(set_to_none=True)
        compute()
        gradients[path] = [parameter.grad.float() for parameter in model.parameters()]
    return {
        path: max(
            ((tree - flat).norm() / flat.norm()).item()
            for flat, tree in zip(gradients[path], gradients["tree"], strict=True)
        )
        for path in paths
        if path != "tree"
    }


def _time_updates(
    model: PreTrainedModel, paths: dict[str, Callable[[], None]], *, repetitions: int
) -> dict[str, Times]:
    """Time whole updates: gradients, then one optimiser step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def update(compute: Callable[[], None]) -> None:
        optimizer.zero_grad(set_to_none=True)
        compute()
        optimizer.step()

    return interleave({path: partial(update, compute) for path, compute in paths.items()}, repetitions=repetitions)


if __name__ == "__main__":
    main()
