"""What an update computed: by hand, and beside the products that torch has counted while real engines train.

Legend: N weights of the layers, V h those of the output head, T tokens, K projected positions.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from tensordict import TensorDict
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3TextConfig, OlmoConfig, Qwen3Config
from verl.utils import tensordict_utils as tu
from verl.utils.flops_counter import FlopsCounter
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
from verl.workers.utils.losses import ppo_loss, value_loss

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.engine import TreeEngine
from verl_tree.engine.rows.computed_paths import ComputedPaths
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.told.update_flops import UpdateFlops
from verl_tree.trainer.worker import TreeTrainingWorker
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

# The model of the fixture `worker_model`, layer by layer: query and output, key and value, gate, up and down.
N = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
HEAD = 31 * 32
PER_SQUARE = 2 * 32
"""Layers times the width of attention."""

PROMPT = [1, 2, 3, 4, 5]
RESPONSES = [[6, 7, 8, 9, 10, 11], [6, 7, 8, 12, 13], [6, 7, 8, 12, 14, 15, 16], [20, 21], [6, 7]]
"""Five tokens, and of the responses 3 + 3 + 1 + 1 + 3 + 2: T = 18. Every token of a response is scored, three times two
by one position: K = 10."""


def flops_of(config: Any, *, is_critic: bool = False) -> UpdateFlops:
    return UpdateFlops(FlopsCounter(config), is_critic=is_critic)


def small_qwen3() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )


def test_the_paths_of_a_layout_by_hand() -> None:
    """The example of `TreeLayout`: 543 543 56 5678 5679, with two duplicates and a row that is a prefix."""
    forest = TokenForest.from_sequences([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6], [5, 4, 3], [5, 4, 3]])
    paths = ComputedPaths.of_layout(TreeLayout.from_forest(forest), num_projected=4)
    assert paths == ComputedPaths(lens=(3, 3, 2, 4, 4), shared_lens=(3, 1, 2, 3), num_projected=4)
    assert paths.num_tokens == 7
    both = ComputedPaths.sum([paths, ComputedPaths.flat([2, 3])])
    assert both == ComputedPaths(lens=(3, 3, 2, 4, 4, 2, 3), shared_lens=(3, 1, 2, 3), num_projected=9)


def test_a_fork_by_hand() -> None:
    """Two rows of 7 tokens share 3: T = 11, and twice the visible pairs less T is 49 + 49 - 9."""
    paths = ComputedPaths(lens=(7, 7), shared_lens=(3,), num_projected=5)
    layers = 6 * N * 11 + 6 * PER_SQUARE * (49 + 49 - 9)
    assert flops_of(small_qwen3()).of_paths(paths) == pytest.approx(layers + 6 * HEAD * 5, rel=1e-12)
    # A critic has one value per token, and no vocabulary.
    assert flops_of(small_qwen3(), is_critic=True).of_paths(paths) == pytest.approx(layers + 6 * 32 * 5, rel=1e-12)


def test_a_row_that_shares_nothing_is_verls_row_without_what_verl_takes_for_a_product() -> None:
    """That is a look-up for each of 9 tokens, and the head at the 4 positions that no score needs."""
    flops = flops_of(small_qwen3())
    alone = ComputedPaths(lens=(9,), num_projected=5)
    assert flops.of_rows([9]) - flops.of_paths(alone) == pytest.approx(6 * HEAD * (9 + 4), rel=1e-12)
    assert flops.of_rows([9]) - flops.of_paths(ComputedPaths.flat([9])) == pytest.approx(6 * HEAD * 9, rel=1e-12)


def test_a_sliding_window_limits_what_a_shared_token_costs() -> None:
    """A row of n tokens counts n times the window to verl. So the second row of 10 adds (10 - 6) x 4."""
    config = Gemma3TextConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    weights = 2 * (8 * 16 * 3 + 8 * (8 + 4 + 4 + 8))
    squares = (2 * 10 * 4 - 6 * 4) + (2 * 10**2 - 6**2)
    paths = ComputedPaths(lens=(10, 10), shared_lens=(6,), num_projected=3)
    wanted = 6 * weights * 14 + 6 * 8 * squares + 6 * 8 * 11 * 3
    assert flops_of(config).of_paths(paths) == pytest.approx(wanted, rel=1e-12)


def test_a_model_that_verl_does_not_know_has_no_flops() -> None:
    flops = flops_of(OlmoConfig())
    assert flops.of_paths(ComputedPaths.flat([5])) == 0.0
    assert flops.share(ComputedPaths.flat([5]), [5]) == 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step on the rows, and what torch counts of it besides what was computed."""

    name: str
    strategy: str = TREE_STRATEGY
    capacity: int = 64
    tree: dict[str, Any] = field(default_factory=dict)
    is_critic: bool = False
    checkpointing: bool = False
    once_more: int = 0  # FLOPs of products of weights
    packs: tuple[int, ...] | None = None  # Tokens of the packs, where all products of attention are compared


# The relayed tree has a spine of 8 tokens, which runs forward once more; 4 of them score, and a critic's all. Of each
# layer checkpointing runs all but the last product once more, which nothing reads.
CASES = [
    Case(name="pack", packs=(18,)),
    Case(name="checkpointing", checkpointing=True, once_more=2 * (N - 2 * 32 * 48) * 18),
    Case(name="two packs", capacity=13, tree={"relay": "never"}, packs=(13, 13)),
    Case(name="relay", capacity=8, tree={"relay": "always"}, once_more=2 * (8 * N + 4 * HEAD)),
    Case(name="flat packs", tree={"gate": "always"}, packs=(47,)),
    Case(name="critic", is_critic=True, packs=(18,)),
    Case(name="relayed critic", is_critic=True, capacity=8, tree={"relay": "always"}, once_more=2 * 8 * (N + 32)),
    # On a CPU verl pads all rows to the longest, of 12 tokens.
    Case(name="verl", strategy=FLAT_STRATEGY, once_more=6 * (N + HEAD) * (5 * 12 - 47)),
]


def train(folder: Path, case: Case) -> tuple[TreeTrainingWorker, TensorDict, dict[str, int]]:
    """Take the step; return the worker, its output, and the FLOPs that torch counted, by operator."""
    is_tree = case.strategy == TREE_STRATEGY
    worker = local_worker(
        str(folder),
        strategy=case.strategy,
        max_token_len=case.capacity,
        is_critic=case.is_critic,
        # The canary's flat passes are no part of an update.
        tree_options={"backend": "dense", "capacity": case.capacity, "canary": 0, **case.tree} if is_tree else None,
        model_options={"enable_gradient_checkpointing": case.checkpointing},
    )
    config, loss = (FSDPCriticConfig, value_loss) if case.is_critic else (FSDPActorConfig, ppo_loss)
    worker.set_loss_fn(partial(loss, config=config(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)))
    names = ("old_log_probs", "advantages", "values", "returns")
    rows = [
        {
            "prompts": torch.tensor(PROMPT),
            "responses": torch.tensor(response),
            "response_mask": torch.ones(len(response), dtype=torch.int64),
            **{name: torch.linspace(-3, 1, len(response)) for name in names},
        }
        for response in RESPONSES
    ]
    batch = batch_of_rows(rows, max_token_len=case.capacity, global_batch_size=len(rows))
    with FlopCounterMode(display=False) as counter:
        output = worker.train_batch(batch)
    assert output is not None
    counted = counter.get_flop_counts()["Global"]
    return worker, output, {str(operator): flops for operator, flops in counted.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_torch_counts(worker_model: Path, case: Case) -> None:
    """Products of weights are equal, but for what ran twice or was padding.

    Of attention, the dense backend computes all pairs of a pack, and scores once more in the backward pass: 14 FLOPs a
    pair, layer and number of a head, where verl has 12 for each pair that is visible. Rotary angles take 16 a token.
    """
    worker, output, counted = train(worker_model, case)
    lens = [len(PROMPT) + len(response) for response in RESPONSES]
    engine = worker.engine
    assert isinstance(engine, TreeEngine) == (case.strategy == TREE_STRATEGY)
    paths = engine.computed_paths if isinstance(engine, TreeEngine) else ComputedPaths.flat(lens)
    flops = flops_of(worker.model_config.hf_config, is_critic=case.is_critic)
    attention = 6 * PER_SQUARE * (sum(n * n for n in paths.lens) - sum(n * n for n in paths.shared_lens))
    of_weights = counted["aten.mm"] + counted.get("aten.addmm", 0)
    assert of_weights == round(flops.of_paths(paths)) - attention + case.once_more
    if case.packs is not None:
        assert paths.num_tokens == sum(case.packs)
        assert counted["aten.bmm"] == sum(14 * PER_SQUARE * n * n + 16 * n for n in case.packs)
    # verl's own number is that of the flat rows.
    metrics = tu.get(output, "metrics")
    assert metrics["mfu"] / metrics["mfu_flat_equivalent"] == pytest.approx(flops.of_paths(paths) / flops.of_rows(lens))
    assert 0 < metrics["mfu"] < metrics["mfu_flat_equivalent"]
