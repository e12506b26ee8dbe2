"""What credit for turns tells an update: gradients of stored sessions, with and without it.

    recipes/memory_qa/run.sh actor_rollout_ref.actor.optim.lr=0 trainer.total_training_steps=24 trainer.test_freq=-1 \
        trainer.val_before_train=false trainer.save_freq=-1 tree.dump_dir=TREES
    PYTHONPATH=. python benchmarks/credit.py --model .cache/memory_qa/*/model --trees TREES --out credit_memory_qa.json

Such a run samples all its trees with the weights that it began with, the MODEL. Two answers are asked about: that of
the session itself, and the right one, that of the prompt's best session (`tree_counterfactual`). `w` is the weight.
Other estimators are there beside them.

Gradients of 8 prompts, 2,000 draws. `with plain` is the mean cosine with the plain gradient of all other prompts: how
far a small step of one length goes uphill, of what is possible. `as many sessions` is how many times as many sessions
the plain gradient would need for that, if its noise falls with their number. `with itself`: of 8 other prompts.

`effects` has, for 100 turns, how many of 16 answers that the model samples are no longer right without the turn, and
the rank correlation (Spearman) of that with the two differences of log-probs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import environment, new_parser, print_table, write_json
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl_tree.functional import score_batch
from verl_tree.records import StoredTree, read_trees
from verl_tree.trainer.advantages import (
    Call,
    Owed,
    SessionTrees,
    contexts_of,
    counterfactual_advantages,
    find_answers,
    gigpo_advantages,
    leaf_advantages,
    treepo_advantages,
    treerl_advantages,
)
from verl_tree.tree import TokenForest
from verl_tree.tree.shape import ForestShape

NUM_DRAWS, NUM_TURNS, NUM_ANSWERS = 2000, 100, 16
GIVEN, RIGHT = "given", "right"
RULES = {"plain": (RIGHT, 0.0), "given, w = 1": (GIVEN, 1.0)} | {f"right, w = {w}": (RIGHT, w) for w in (0.5, 1.0, 2.0)}


class Asked(NamedTuple):
    """A turn, and what it did: for the answer that its session gave, and for the right one."""

    given: Owed
    right: Owed
    whole: np.ndarray  # tokens of the context
    without: np.ndarray
    answer: np.ndarray  # the right one


class Group:
    """A prompt's rows with their advantages by each rule."""

    def __init__(self, model: PreTrainedModel, tree: StoredTree) -> None:
        self.leaves, self.asked = tree.leaves, list[Asked]()
        tokens = [leaf.token_ids for leaf in self.leaves]
        rewards = np.array([leaf.reward or 0.0 for leaf in self.leaves])
        sessions = [leaf.session for leaf in self.leaves]
        groups = [tree.uid] * len(tokens)
        self.is_live = bool(leaf_advantages(rewards, groups=groups, sessions=sessions).any())
        if not self.is_live:
            return
        answers = find_answers(tokens, [leaf.is_trained for leaf in self.leaves], sessions=sessions)
        best = max(answers, key=lambda each: rewards[each.row])
        right = tokens[best.row][best.start : best.end]
        for answer in answers:
            if not answer.turns:
                continue
            own = tokens[answer.row]
            contexts = contexts_of(answer, own)
            scores = score_batch(model, [(context, [own[answer.start : answer.end], right]) for context in contexts])
            sums = [each.sums.tolist() for each in scores]
            for turn, context, after in zip(answer.turns, contexts[1:], sums[1:], strict=True):
                given, owed = (
                    Owed(turn.row, turn.start, turn.end, before - without)
                    for before, without in zip(sums[0], after, strict=True)
                )
                self.asked.append(Asked(given, owed, contexts[0], context, right))
        response_lens = [len(leaf.token_ids) - leaf.prompt_len for leaf in self.leaves]
        width = max(response_lens)
        by = {"groups": groups, "sessions": sessions}
        self.advantages = {
            name: counterfactual_advantages(
                rewards,
                owed=[getattr(each, which) for each in self.asked],
                row_lens=[len(each) for each in tokens],
                response_lens=response_lens,
                width=width,
                weight=weight,
                **by,
            )
            for name, (which, weight) in RULES.items()
        }
        trees = SessionTrees.from_leaves(tokens, rewards=rewards, **by)
        for name, estimate in (("treerl", treerl_advantages), ("treepo", treepo_advantages)):
            self.advantages[name] = trees.on_responses(estimate(trees), response_lens=response_lens, width=width)
        rewards_RW = np.zeros((len(tokens), width))
        rewards_RW[np.arange(len(tokens)), np.array(response_lens) - 1] = rewards
        self.advantages["gigpo"] = gigpo_advantages(
            rewards_RW,
            shape=ForestShape.of(TokenForest.from_sequences(tokens)),
            response_lens=response_lens,
            calls=[[Call(run.start, run.end) for run in leaf.calls] for leaf in self.leaves],
            **by,
        )

    def gradients(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the policy gradient by each rule, (P,)."""
        longest = max(len(leaf.token_ids) for leaf in self.leaves)
        ids = torch.zeros(len(self.leaves), longest, dtype=torch.long)
        weights = {name: torch.zeros(ids.shape) for name in self.advantages}
        for row, leaf in enumerate(self.leaves):
            ids[row, : len(leaf.token_ids)] = torch.from_numpy(leaf.token_ids.astype(np.int64))
            response = slice(leaf.prompt_len, len(leaf.token_ids))
            for name, advantages_RW in self.advantages.items():
                values = advantages_RW[row, : len(leaf.token_ids) - leaf.prompt_len] * leaf.is_trained[response]
                weights[name][row, response] = torch.from_numpy(values)
        log_probs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        parameters = list(model.parameters())
        losses = {name: (weight[:, 1:] * log_probs).sum() for name, weight in weights.items()}
        found = {name: torch.autograd.grad(loss, parameters, retain_graph=True) for name, loss in losses.items()}
        return {name: torch.cat([part.flatten() for part in parts]) for name, parts in found.items()}


def compare(by_rule: dict[str, torch.Tensor], *, num_groups: int) -> list[dict[str, Any]]:
    """Return a line for each rule; `by_rule` has the gradients of the live groups, (G, P)."""
    plain = by_rule["plain"]
    with_plain = {name: (rows @ plain.T).double().numpy() for name, rows in by_rule.items()}
    with_itself = {name: (rows @ rows.T).double().numpy() for name, rows in by_rule.items()}
    cosines: dict[str, list[tuple[float, float]]] = {name: [] for name in by_rule}
    rng = np.random.default_rng(1)
    for _ in range(NUM_DRAWS):
        drawn = rng.permutation(num_groups)
        one, two, others = (part[part < len(plain)] for part in (drawn[:8], drawn[8:16], drawn[8:]))
        if not len(one) or not len(two):
            continue
        far = np.sqrt(with_plain["plain"][np.ix_(others, others)].sum())
        for name in by_rule:
            long, other = (np.sqrt(with_itself[name][np.ix_(part, part)].sum()) for part in (one, two))
            uphill = with_plain[name][np.ix_(one, others)].sum() / (long * far)
            cosines[name].append((uphill, with_itself[name][np.ix_(one, two)].sum() / (long * other)))
    means = {name: np.mean(each, axis=0) for name, each in cosines.items()}

    def signal(cosine: float) -> float:
        return cosine**2 / (1 - cosine**2)

    return [
        {
            "rule": name,
            "with plain": round(uphill, 3),
            "as many sessions": round(signal(uphill) / signal(means["plain"][0]), 2),
            "with itself": round(alike, 3),
        }
        for name, (uphill, alike) in means.items()
    ]


@torch.no_grad()
def share_right(model: PreTrainedModel, context: np.ndarray, answer: np.ndarray, *, rng: torch.Generator) -> float:
    """Sample 16 answers behind a context; return the share of those that are the right one."""
    ids = torch.from_numpy(context.astype(np.int64)).repeat(NUM_ANSWERS, 1)
    is_right = torch.ones(NUM_ANSWERS, dtype=torch.bool)
    for token in answer.tolist():
        drawn = torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1, generator=rng)
        is_right &= drawn[:, 0] == token
        ids = torch.cat([ids, drawn], dim=1)
    return float(is_right.double().mean())


def effects(model: PreTrainedModel, groups: Sequence[Group]) -> dict[str, Any]:
    """Compare what turns are owed with what happens without them, for one turn of each of 100 groups."""
    draw, rng = np.random.default_rng(1), torch.Generator().manual_seed(1)
    found = []
    for group in (group for group in groups if group.asked):
        each = group.asked[draw.integers(len(group.asked))]
        with_turn, without = (share_right(model, part, each.answer, rng=rng) for part in (each.whole, each.without))
        found.append((each.given.nats, each.right.nats, with_turn - without))
        if len(found) == NUM_TURNS:
            break
    given, right, lost = np.array(found).T
    return {
        "turns": len(found),
        "right answers lost": round(float(lost.mean()), 3),
        "turns without effect": round(float((lost == 0).mean()), 2),
        "correlation, answer given": round(float(spearmanr(given, lost).statistic), 2),
        "correlation, right answer": round(float(spearmanr(right, lost).statistic), 2),
    }


def main() -> None:
    """Score, compare, sample."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trees", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    trees = [tree for file in sorted(options.trees.glob("*.parquet")) for tree in read_trees(file)]
    live = [group for group in (Group(model, tree) for tree in trees) if group.is_live]
    rows = [group.gradients(model) for group in live]
    lines = compare({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, num_groups=len(trees))
    counts = {"prompts": len(trees), "live": len(live), "turns": sum(len(group.asked) for group in live)}
    found = effects(model, live)
    print_table(lines)
    print(counts, found)
    write_json({"environment": environment(options), "counts": counts, "rules": lines, "effects": found}, options.out)


if __name__ == "__main__":
    main()
