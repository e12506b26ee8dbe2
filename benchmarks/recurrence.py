"""Speed of a hybrid on trees beside flat rows: one forward and backward pass of all rows, on this machine's CPU.

Two small Qwen3.5 (`--model`), with heads of the published models' size (128 x 128): one recurrent layer and one of
attention, or three and one. Flat rows run one after another through transformers' own code. Freed memory stays in the
process, on both sides. Otherwise a pack, whose tensors are large, would get fresh pages from the system for each of
them, and rows, whose tensors are small, would not. A case is appended to `--out` when it is done::

    python benchmarks/recurrence.py --model two_layers --out docs/benchmarks/data/recurrence.jsonl
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import Times, append_record, environment, interleave, keep_freed_memory, new_parser, print_table
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from verl_tree.functional import tree_log_probs
from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.stand_ins import CHUNK_SIZE
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan

VOCABULARY = 4096

Sequences = list[np.ndarray]


MODELS: dict[str, dict[str, Any]] = {
    "two_layers": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    "four_layers": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}


def small_model(name: str) -> PreTrainedModel:
    """Make a model of `MODELS`, random, in float32."""
    torch.manual_seed(0)
    sizes = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **MODELS[name])).eval()


def tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    """Draw tokens."""
    return rng.integers(0, VOCABULARY, length)


def branches(rng: np.random.Generator, prompt_len: int, num_branches: int, branch_len: int) -> Sequences:
    """Draw one prompt with so many branches."""
    prompt = tokens(rng, prompt_len)
    return [np.concatenate([prompt, tokens(rng, branch_len)]) for _ in range(num_branches)]


def deep(rng: np.random.Generator) -> Sequences:
    """Draw 30 turns of 48 tokens after a prompt of 256, with a leaf of 24 tokens after each."""
    path, leaves = tokens(rng, 256), []
    for _ in range(30):
        path = np.concatenate([path, tokens(rng, 48)])
        leaves.append(np.concatenate([path, tokens(rng, 24)]))
    return leaves


def search(rng: np.random.Generator) -> Sequences:
    """Draw a binary tree of seven levels, of nodes of 20 to 60 tokens, after a prompt of 240."""
    paths = [tokens(rng, 240)]
    for level in range(7):
        paths = [
            np.concatenate([path, tokens(rng, int(rng.integers(20, 61)))])
            for path in paths
            for _ in range(2 if level else 1)
        ]
    return paths


CASES: dict[str, Callable[[np.random.Generator], Sequences]] = {
    "1,024 + 16 x 128": lambda rng: branches(rng, 1024, 16, 128),
    "512 + 8 x 512": lambda rng: branches(rng, 512, 8, 512),
    "deep, 30 turns": deep,
    "search, 7 levels": search,
    "600 + 64 x 1": lambda rng: branches(rng, 600, 64, 1),
}


def flat(model: PreTrainedModel, sequences: Sequences) -> float:
    """Run row by row, forward and backward; return the sum of the log-probs."""
    total = 0.0
    for sequence in sequences:
        token_ids = torch.from_numpy(sequence)
        log_probs = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        own = log_probs.gather(-1, token_ids[1:, None]).sum()
        own.backward()
        total += own.item()
    return total


def tree(model: PreTrainedModel, sequences: Sequences) -> float:
    """Run all rows as one pack, forward and backward; return the sum of the log-probs."""
    total = torch.cat(tree_log_probs(model, sequences).log_probs).sum()
    total.backward()
    return total.item()


def measure(name: str, model: PreTrainedModel, *, repetitions: int) -> dict[str, object]:
    """Time one case."""
    sequences = CASES[name](np.random.default_rng(0))
    forest = TokenForest.from_sequences(sequences)
    chunks = TreeChunks.of_plan(AttentionPlan.from_layout(TreeLayout.from_forest(forest)), size=CHUNK_SIZE)
    sums: dict[str, float] = {}

    def run(path: str, function: Callable[[PreTrainedModel, Sequences], float]) -> None:
        sums[path] = function(model, sequences)

    model.zero_grad()
    times: dict[str, Times] = interleave(
        {"flat": lambda: run("flat", flat), "tree": lambda: run("tree", tree)},
        repetitions=repetitions,
        title=f"{name}: ",
    )
    assert abs(sums["tree"] / sums["flat"] - 1) < 1e-5, sums
    compression = forest.num_flat_tokens / forest.num_tokens
    speed_up = times["flat"].median_cpu_s / times["tree"].median_cpu_s
    return {
        "case": name,
        "flat_tokens": forest.num_flat_tokens,
        "tree_tokens": forest.num_tokens,
        "steps": chunks.num_steps,
        "fill": round(forest.num_tokens / chunks.token_MC.numel(), 2),
        "flat_cpu_s": round(times["flat"].median_cpu_s, 2),
        "tree_cpu_s": round(times["tree"].median_cpu_s, 2),
        "compression": round(compression, 2),
        "speed_up": round(speed_up, 2),
        "share": round(speed_up / compression, 2),
        "all_cpu_s": {path: each.cpu_s for path, each in times.items()},
    }


def main() -> None:
    """Measure the cases named on the command line, or all."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="two_layers")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {list(CASES)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    model, rows = small_model(options.model), []
    for name in options.cases:
        record = {"model": options.model} | measure(name, model, repetitions=options.repetitions)
        append_record(record | {"environment": environment(options)}, options.out)
        rows.append({key: value for key, value in record.items() if key != "all_cpu_s"})
    print_table(rows)


if __name__ == "__main__":
    main()
