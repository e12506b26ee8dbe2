"""Trees whose tokens lie on two ranks: `sharding_cases.py` in two processes, and what one process can show."""

from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from rank_scripts import run_script
from sharding_cases import CASES

from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.sharding import SequenceShard, why_not_dealt

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run all cases once; return the results of both ranks."""
    out = tmp_path_factory.mktemp("sharding") / "results.json"
    return run_script("sharding_cases.py", num_ranks=2, out=out)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_flat_rows(ranks, name):
    assert max(rank[name] for rank in ranks) < TOLERANCE


@pytest.mark.parametrize("name", ["scores", "temperature"])
def test_scores_are_those_of_flat_rows_on_every_rank(ranks, name):
    for rank in ranks:
        assert max(rank[name].values()) < TOLERANCE, rank[name]


def test_a_wrong_factor_of_the_gradients_is_found(ranks):
    """Guards the tests above: without the factor, averaging over two ranks halves the gradient."""
    for rank in ranks:
        assert rank["control"]["gradient"] == pytest.approx(0.5)
        assert max(rank["control"][kind] for kind in ("log_probs", "entropy")) < TOLERANCE


def test_tokens_and_heads_lie_as_the_docs_draw_them(ranks):
    """A number has the token in its first digit, from 1 on, and the head in its second."""
    first, second = (rank["example"] for rank in ranks)
    assert first["slice"] == first["gathered"] == [[10, 11, 12, 13], [30, 31, 32, 33], [50, 51, 52, 53]]
    assert second["slice"] == second["gathered"] == [[20, 21, 22, 23], [40, 41, 42, 43], [0, 0, 0, 0]]
    assert first["query"] == first["key"] == [[10, 11], [20, 21], [30, 31], [40, 41], [50, 51]]
    assert second["query"] == second["key"] == [[12, 13], [22, 23], [32, 33], [42, 43], [52, 53]]
    # A head that both ranks need is sent to both.
    assert first["one_value_head"] == second["one_value_head"] == [[10], [20], [30], [40], [50]]
    assert (first["heads"], second["heads"]) == ([0, 1], [2, 3])
    # Of the places 0, 1, 1, 4, numbers 0 and 3 lie on the first rank.
    assert (first["own"], second["own"]) == ([[0, 3], [0, 2]], [[1, 2], [0, 0]])


def test_a_rank_stores_the_keys_and_values_of_its_own_heads(ranks):
    for rank in ranks:
        alone, on_team = rank["store_bytes"]
        assert on_team * 2 == alone > 0


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "reason"),
    [
        (32, 8, 8, None),
        (32, 8, 4, None),
        (32, 8, 16, None),
        (28, 4, 8, "28 attention heads cannot be dealt to 8 ranks evenly; give a divisor of 28"),
        (24, 6, 4, "6 key-value heads cannot be dealt to 4 ranks evenly; give a divisor or a multiple of 6"),
    ],
)
def test_heads_that_cannot_be_dealt_are_refused(num_heads, num_kv_heads, num_ranks, reason):
    assert why_not_dealt(num_heads, num_kv_heads, num_ranks=num_ranks) == reason


def test_a_rank_alone_has_everything():
    shard, tokens = SequenceShard(5), torch.arange(5)
    heads = torch.randn(5, 4, 2)
    assert shard.slice(tokens) is tokens
    assert all(each is heads for each in shard.scatter_heads(heads, heads, heads))
    assert shard.gather_heads(heads) is heads
    assert shard.own_heads(tokens).tolist() == tokens.tolist()
    assert [each.tolist() for each in shard.own(tokens)] == [tokens.tolist()] * 2


def test_a_plan_has_a_shard_of_its_queries():
    assert AttentionPlan.from_subtree_end(torch.tensor([4, 4, 3, 4]), num_context=1).shard.num_tokens == 3
    with pytest.raises(AssertionError):
        AttentionPlan.from_subtree_end(torch.tensor([4, 4, 3, 4]), num_context=1, shard=SequenceShard(4))
