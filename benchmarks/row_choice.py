"""How noisy the gradient becomes if an update computes half of its tree tokens: which rows to take.

    python benchmarks/row_choice.py --out row_choice.json

Of stored trees (docs/benchmarks/data/trees) the live rows are taken: advantages of `tree_grpo`, other than 0. The
gradient of a policy-gradient loss by each row is computed once on a small random Qwen3, and 200 draws of rows are
compared with the sum over all. A rule keeps row i with probability p_i, which it scales so that the mean tree tokens of
what is kept are half of all; a kept row weighs 1 / p_i.

`uniform`    the same p for every row
`advantage`  p_i ~ |A_i|
`cost`       p_i ~ |A_i| sqrt(trained tokens / marginal tree tokens), what `tree.keep_tokens` does
`sessions`   the same p for every session, whose rows are kept or left together
`pods`       the rows of the largest and least rewards of a prompt, with baselines and weights among themselves
             (PODS, arXiv 2504.13818: the subset with the greatest variance); biased

The error is E|g' - g|^2 / |g|^2, bias included.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import environment, new_parser, print_table, write_json
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_tree.engine.losses.row_choice import probabilities
from verl_tree.records import read_trees
from verl_tree.trainer.advantages import leaf_advantages
from verl_tree.tree import TokenForest

TREES = Path("docs/benchmarks/data/trees")
FORESTS = ("arithmetic_tools", "memory_qa", "multi_turn_thinking", "tree_search_reasoning")
NUM_DRAWS = 200
HALF = 0.5

Draw = Callable[[np.random.Generator], np.ndarray]
"""Returns a weight for each row, 0 for those that are left out."""


class Rows:
    """The live rows of stored trees: R of them."""

    def __init__(self, path: Path) -> None:
        trees = read_trees(path)
        leaves = [(tree.uid, leaf) for tree in trees for leaf in tree.leaves]
        rewards = np.array([leaf.reward for _, leaf in leaves], dtype=np.float64)
        groups, sessions = [uid for uid, _ in leaves], [leaf.session for _, leaf in leaves]
        advantages = leaf_advantages(rewards, groups=groups, sessions=sessions)
        live = np.flatnonzero(advantages)
        self.num_all = len(leaves)
        self.tokens = [np.asarray(leaves[row][1].token_ids, dtype=np.int64) for row in live]
        self.trained = [leaves[row][1].is_trained for row in live]
        self.advantages, self.rewards = advantages[live], rewards[live]
        self.groups = np.unique([groups[row] for row in live], return_inverse=True)[1]
        names = [f"{groups[row]} {sessions[row]}" for row in live]
        self.sessions = np.unique(names, return_inverse=True)[1]
        self.forest = TokenForest.from_sequences(self.tokens)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.tokens)

    def num_tokens(self, kept: np.ndarray) -> int:
        """Tree tokens of some rows, (R,) bool."""
        in_order = self.forest.order[kept[self.forest.order]]
        return int(self.forest.sequence_lens[in_order].sum() - self.forest.subset_lcp(in_order).sum())

    def gradients(self) -> torch.Tensor:
        """Return what each row adds to the gradient, (R, P)."""
        torch.manual_seed(0)
        size = max(int(row.max()) for row in self.tokens) + 1
        config = Qwen3Config(
            vocab_size=size, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        num_tokens = sum(int(mask.sum()) for mask in self.trained)
        found = []
        for tokens, mask, advantage in zip(self.tokens, self.trained, self.advantages, strict=True):
            model.zero_grad()
            ids = torch.from_numpy(tokens)[None]
            log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            (-advantage * log_probs[torch.from_numpy(mask[1:])].sum() / num_tokens).backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        return torch.stack(found)


def thinned(rows: Rows, share: np.ndarray, *, budget: float, units: np.ndarray | None = None) -> Draw:
    """Keep rows, or whole units of rows, with probabilities in proportion to a share, at `budget` tokens on average."""
    units = np.arange(rows.num_rows) if units is None else units

    def keep(scale: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        p = np.minimum(1.0, scale * share)
        return rng.random(units.max() + 1)[units] < p, p

    low, high = 0.0, 1.0 / share.min()
    for _ in range(40):
        scale = (low + high) / 2
        mean = np.mean([rows.num_tokens(keep(scale, np.random.default_rng(draw))[0]) for draw in range(NUM_DRAWS)])
        low, high = (low, scale) if mean > budget else (scale, high)

    def draw(rng: np.random.Generator) -> np.ndarray:
        kept, p = keep(low, rng)
        return kept / p

    return draw


def drawn(p: np.ndarray) -> Draw:
    """Keep each row with its own probability."""
    return lambda rng: (rng.random(len(p)) < p) / p


def pods(rows: Rows, *, budget: float) -> Draw:
    """Keep the rows of the largest and least rewards of each prompt, as many of each as the budget allows."""

    def kept(num: int) -> tuple[np.ndarray, np.ndarray]:
        is_kept, advantages = np.zeros(rows.num_rows, dtype=bool), np.zeros(rows.num_rows)
        for group in range(rows.groups.max() + 1):
            (members,) = np.nonzero(rows.groups == group)
            order = members[np.argsort(rows.rewards[members], kind="stable")]
            # The subset of so many rows whose rewards vary most has some of the least and the rest of the largest.
            num_here = min(num, len(order))
            cuts = [np.r_[order[:low], order[len(order) - num_here + low :]] for low in range(num_here + 1)]
            best = max(cuts, key=lambda chosen: rows.rewards[chosen].var())
            is_kept[best] = True
            deviation = rows.rewards[best] - rows.rewards[best].mean()
            advantages[best] = deviation / (rows.rewards[best].std() + 1e-6) * len(members) / num_here
        return is_kept, advantages

    num = 1
    while num < rows.num_rows and rows.num_tokens(kept(num + 1)[0]) <= budget:
        num += 1
    is_kept, advantages = kept(num)
    return lambda _: np.where(is_kept, advantages / rows.advantages, 0.0)


def compare(name: str) -> list[dict[str, Any]]:
    """Return a line for each rule on a stored forest."""
    rows = Rows(TREES / f"{name}.parquet")
    every = np.ones(rows.num_rows, dtype=bool)
    num_tokens, gradients = rows.num_tokens(every), rows.gradients()
    budget, size = HALF * num_tokens, np.abs(rows.advantages)
    num_trained = np.array([mask.sum() for mask in rows.trained])
    draws = {
        "uniform": thinned(rows, np.ones(rows.num_rows), budget=budget),
        "advantage": thinned(rows, size, budget=budget),
        "cost": drawn(probabilities(rows.forest, size * np.sqrt(num_trained), share=HALF)),
        "sessions": thinned(rows, np.ones(rows.num_rows), budget=budget, units=rows.sessions),
        "pods": pods(rows, budget=budget),
    }
    whole = gradients.sum(0)
    lines = []
    for rule, draw in draws.items():
        rng = np.random.default_rng(7)
        weights = np.stack([draw(rng) for _ in range(NUM_DRAWS)])
        far = torch.from_numpy(weights - 1.0).float() @ gradients
        tokens = [rows.num_tokens(weight != 0) for weight in weights]
        lines.append(
            {
                "forest": name,
                "rule": rule,
                "rows": f"{rows.num_rows} of {rows.num_all}",
                "kept rows": round(float((weights != 0).sum(1).mean()), 1),
                "tokens": round(float(np.mean(tokens)) / num_tokens, 3),
                "error": round(float(far.square().sum(1).mean() / whole.square().sum()), 3),
                "bias": round(float(far.mean(0).norm() / whole.norm()), 3),
            }
        )
    return lines


def main() -> None:
    """Compare the rules on all forests."""
    options = new_parser(__doc__).parse_args()
    lines = [line for name in FORESTS for line in compare(name)]
    print_table(lines)
    write_json({"environment": environment(options), "rules": lines}, options.out)


if __name__ == "__main__":
    main()
