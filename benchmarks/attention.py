"""Times tree attention against what it competes with, on eight shapes of trees, and whole-model updates.

Attention, forward and backward, bf16, one layer, per shape:

- every backend of `verl_tree.attention` that serves the inputs; of the sections of at most a quarter of the tokens, it
  also runs the one with the longest context (`section`), and context and section in one pack (`its pack`);
- `flex`: torch's FlexAttention with the same mask;
- `flat`: sequence packing, every trajectory by itself with torch's flash kernel (`aten::_flash_attention_forward`,
  which is what a flat trainer runs; its time is that of all flat tokens);
- `causal`: torch's flash attention on one causal sequence with as many visible pairs as the tree: the ceiling.

TFLOP/s count 4 Hq D (forward) and 10 Hq D (backward) per visible pair: those of the section and of its pack for these,
those of the tree for all others.

Whole model (`--model`): forward and backward of a stack of Qwen3 layers with log-probs of the branches, a prompt of
8,192 tokens with 16 branches, tree against one trajectory after another, gradients compared.

    python benchmarks/attention.py [--device cuda] [--out attention.json] [--model] [--shapes ...] [--small]
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import Times, environment, interleave, new_parser, write_json

from verl_tree.attention import BACKENDS, AttentionPlan, tree_attention
from verl_tree.relay.cut import cut
from verl_tree.testing.synthetic import caterpillar, groups, overlap, star, tool_fan_out, tree_search
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

NUM_HEADS, NUM_KV_HEADS = 32, 8
BLOCK_LEN = 128

SHAPES: dict[str, Callable[[], list[np.ndarray]]] = {
    "GRPO star 1k + 16 x (1-4k)": lambda: star(16, prompt_len=1024, branch_len=(1024, 4096)),
    "8k prompt, 16 x 512": lambda: star(16, prompt_len=8192, branch_len=512),
    "forest of 8 stars": lambda: groups(_small_star, num_groups=8),
    "agent, depth 5": lambda: tool_fan_out(5, num_calls=3, prompt_len=4096),
    "MCTS, nodes of 30-100": lambda: tree_search(
        num_trees=8, num_expansions=8, num_rounds=6, num_steps=8, prompt_len=1024, step_len=(30, 100)
    ),
    "branch 4, depth 4": lambda: overlap(0.75, num_leaves=64, num_flat_tokens=64 * 2048, depth=4),
    "trunk of 64 with side branches": lambda: caterpillar(
        64, question_len=(64, 128), thinking_len=(64, 512), answer_len=(64, 128)
    ),
    "128k star": lambda: star(32, prompt_len=8192, branch_len=3840),
}


def _small_star(**keywords: Any) -> list[np.ndarray]:
    return star(8, prompt_len=512, branch_len=(256, 768), **keywords)


def main() -> None:
    """Run the table or the model comparison, print it and write the JSON."""
    options = _parse_options()
    device = torch.device(options.device)
    if options.model:
        records = [_time_model(name, device=device, small=options.small) for name in MODELS]
        for record in records:
            print(
                f"{record['model']}: compression {record['compression']:.2f}, update {record['flat_s']:.3f} s flat, "
                f"{record['tree_s']:.3f} s tree: {record['ratio']:.2f}x, {record['ratio'] / record['compression']:.2f} "
                f"of the compression; gradients differ by {record['gradient_difference']:.1e}"
            )
    else:
        records = [
            _time_shape(name, device=device, head_dim=head_dim, options=options)
            for head_dim in options.head_dims
            for name in options.shapes
        ]
        _print_table(records)
    write_json({"environment": environment(options), "records": records}, options.out)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", action="store_true", help="whole-model updates instead of single layers")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that the script runs")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


def _time_shape(name: str, *, device: torch.device, head_dim: int, options: argparse.Namespace) -> dict[str, Any]:
    sequences = SHAPES[name]()
    if options.small:
        sequences = [row[:96] for row in sequences[:4]]
    layout = TreeLayout.from_forest(TokenForest.from_sequences(sequences), device=device)
    started = time.perf_counter()
    plan = AttentionPlan.from_layout(layout)
    plan_s = time.perf_counter() - started
    num_pairs = plan.num_visible_pairs
    flat_lens = [len(row) for row in sequences]
    causal_len = int(np.sqrt(2 * num_pairs))
    section = longest_context(layout, capacity=-(-layout.num_tokens // 4))
    its_pack = AttentionPlan.from_subtree_end(section.subtree_end_T)
    contenders = {
        backend + suffix: _tree_contender(of_plan, backend)
        for suffix, of_plan in (("", plan), (", section", section), (", its pack", its_pack))
        for backend, found in BACKENDS.items()
        if not found.is_oracle
    }
    for contender, call, num_tokens in (
        ("flex", _flex_call(plan, device), layout.num_tokens),
        ("flat", _flat_call(flat_lens, device), sum(flat_lens)),
        ("causal", _flat_call([causal_len], device), causal_len),
    ):
        contenders[contender] = Contender(call, num_tokens, num_tokens, num_pairs)
    record: dict[str, Any] = {
        "shape": name,
        "head_dim": head_dim,
        "tree_tokens": layout.num_tokens,
        "flat_tokens": sum(flat_lens),
        "visible_pairs": num_pairs,
        "visited_pairs": _visited_pairs(layout.subtree_end_T.cpu().numpy()),
        "section": {"context": section.num_context, "queries": section.num_queries},
        "plan_s": plan_s,
        "contenders": {},
    }
    for contender, timed in contenders.items():
        try:
            times = _time_call(timed, head_dim=head_dim, device=device, repetitions=options.repetitions)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            record["contenders"][contender] = {"not_run": str(error).splitlines()[0][:200]}
            continue
        flops = 4 * NUM_HEADS * head_dim * timed.num_pairs
        record["contenders"][contender] = times | {
            "visible_pairs": timed.num_pairs,
            "forward_tflops": flops / times["forward_s"] / 1e12,
            "backward_tflops": 2.5 * flops / times["backward_s"] / 1e12,
        }
    return record


def longest_context(layout: TreeLayout, *, capacity: int) -> AttentionPlan:
    """Cut a layout into sections and return the plan of the one with the longest context."""
    tree = (layout.subtree_end_T.cpu().numpy(), layout.position_T.cpu().numpy())
    sections = cut(*tree, capacity=capacity, section_cost=0).sections
    section = max(sections, key=lambda section: section.num_context)
    device = layout.subtree_end_T.device
    return AttentionPlan.from_subtree_end(section.subtree_end, device=device, num_context=section.num_context)


class Contender(NamedTuple):
    """What is timed: `call(q, k, v)` on so many queries and keys, of which so many pairs are visible."""

    call: Callable[..., torch.Tensor]
    num_queries: int
    num_tokens: int
    num_pairs: int


def _tree_contender(plan: AttentionPlan, backend: str) -> Contender:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tree_attention(q, k, v, plan, backend=backend)

    return Contender(call, plan.num_queries, plan.num_tokens, plan.num_visible_pairs)


def _flex_call(plan: AttentionPlan, device: torch.device) -> Callable[..., torch.Tensor]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if device.type != "cuda":
            raise NotImplementedError("FlexAttention has no backward on a CPU")
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if "compiled" not in cache:
            end_T = plan.subtree_end_T
            cache["mask"] = create_block_mask(
                lambda _batch, _head, q_index, kv_index: (kv_index <= q_index) & (q_index < end_T[kv_index]),
                None,
                None,
                plan.num_tokens,
                plan.num_tokens,
                device=device,
                _compile=True,
            )
            cache["compiled"] = torch.compile(flex_attention, dynamic=False)
        heads_first = [each.transpose(0, 1)[None] for each in (q, k, v)]
        return cache["compiled"](*heads_first, block_mask=cache["mask"], enable_gqa=True)[0].transpose(0, 1)

    cache: dict[str, Any] = {}
    return call


def _flat_call(lens: list[int], device: torch.device) -> Callable[..., torch.Tensor]:
    """Causal attention of sequences one after another: one varlen flash call on a GPU, a loop over SDPA on a CPU."""
    bounds = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32, device=device)

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups_per_head = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(groups_per_head, dim=1) for each in (k, v))
        return torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, max(lens), max(lens), 0.0, True, False)[
            0
        ]

    def loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs = []
        for rows in zip(*(each.split(lens) for each in (q, k, v)), strict=True):
            heads_first = [each.transpose(0, 1)[None] for each in rows]
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    return varlen if device.type == "cuda" else loop


def _visited_pairs(subtree_end_T: np.ndarray) -> int:
    """Count the pairs of the blocks of 128 x 128 that hold a visible pair."""
    num_tokens = len(subtree_end_T)
    starts = np.arange(0, num_tokens, BLOCK_LEN)
    last_seen = np.maximum.reduceat(subtree_end_T, starts)  # one past the last query that sees a key of the block
    lens = np.minimum(starts + BLOCK_LEN, num_tokens) - starts
    first_block = np.arange(len(starts))
    last_block = -(-last_seen // BLOCK_LEN)
    query_lens = np.concatenate(([0], np.cumsum(lens)))
    return int((lens * (query_lens[last_block] - query_lens[first_block])).sum())


def _time_call(timed: Contender, *, head_dim: int, device: torch.device, repetitions: int) -> dict[str, float]:
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, head_dim, device=device, generator=generator)
        return values.to(torch.bfloat16).requires_grad_()

    inputs = [random(timed.num_queries, NUM_HEADS), *(random(timed.num_tokens, NUM_KV_HEADS) for _ in range(2))]
    grad_out = random(timed.num_queries, NUM_HEADS).detach()
    is_cuda = device.type == "cuda"
    forward, backward = Times(), Times()
    for number in range(repetitions + 2):
        if number == 2:  # the first two compile and allocate
            forward, backward = Times(), Times()
        with forward.measure(is_cuda=is_cuda):
            out = timed.call(*inputs)
        with backward.measure(is_cuda=is_cuda):
            torch.autograd.grad(out, inputs, grad_out)
    return {"forward_s": forward.median_s, "backward_s": backward.median_s}


def _print_table(records: list[dict[str, Any]]) -> None:
    for record in records:
        compression, section = record["flat_tokens"] / record["tree_tokens"], record["section"]
        print(
            f"\n{record['shape']} (D {record['head_dim']}): {record['tree_tokens']:,} tree tokens, compression "
            f"{compression:.2f}, {record['visible_pairs'] / record['visited_pairs']:.0%} of the visited pairs visible, "
            f"plan {record['plan_s'] * 1000:.0f} ms; section of {section['queries']:,} queries behind a context of "
            f"{section['context']:,}"
        )
        for contender, result in record["contenders"].items():
            if "not_run" in result:
                print(f"  {contender:>16}: not run: {result['not_run']}")
                continue
            parts = [
                f"{part} {result[f'{part}_s'] * 1000:9.2f} ms {result[f'{part}_tflops']:6.1f} TFLOP/s"
                for part in ("forward", "backward")
            ]
            print(f"  {contender:>16}: {', '.join(parts)}")
    print("\nTFLOP/s are on visible pairs, for flat on the tree's: they say how much a flat trainer gets done of them")


MODELS = {
    "Qwen3-0.6B, 4 layers": {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
    },
    "8B-shaped, 2 layers": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
}


def _time_model(name: str, *, device: torch.device, small: bool) -> dict[str, Any]:
    """One update's forward and backward of the same trajectories, as a tree and one by one, interleaved."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from update import flat_gradients, max_gradient_differences, tree_gradients

    from verl_tree.attention.hf import register

    register()
    sizes = dict(MODELS[name])
    if small:
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    prompt_len, branch_len = (64, 16) if small else (8192, 512)
    config = Qwen3Config(
        **sizes,
        head_dim=16 if small else 128,
        num_hidden_layers=int(name.split(", ")[1].split()[0]),
        vocab_size=512 if small else 32_768,
        tie_word_embeddings=True,
        max_position_embeddings=16_384,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(device=device, dtype=torch.bfloat16).train()
    sequences = star(16, prompt_len=prompt_len, branch_len=branch_len, vocab_size=config.vocab_size)
    forest = TokenForest.from_sequences(sequences)
    coefficients = [torch.full((branch_len,), 1 / len(sequences), device=device)] * len(sequences)
    inputs = {"coefficients": coefficients, "first_scored": prompt_len}
    paths = {
        "tree": lambda: tree_gradients(model, forest, **inputs),
        "flat": lambda: flat_gradients(model, sequences, **inputs, all_logits=False),
    }
    difference = max_gradient_differences(model, paths)["flat"]
    times = interleave(paths, repetitions=2 if small else 5, num_warmups=1, is_cuda=device.type == "cuda")
    tree_s, flat_s = (times[path].median_s for path in ("tree", "flat"))
    return {
        "model": name,
        "compression": forest.num_flat_tokens / forest.num_tokens,
        "tree_s": tree_s,
        "flat_s": flat_s,
        "ratio": flat_s / tree_s,
        "gradient_difference": difference,
        "times_s": {path: each.wall_s for path, each in times.items()},
    }


if __name__ == "__main__":
    main()
