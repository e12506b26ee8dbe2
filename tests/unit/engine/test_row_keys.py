"""Keys of rows by hand, and rows that share their prompts only beside full sharing, in float64."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tree_cases import gradients, random_sequences, relative_error

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel
from verl_tree.engine.rows.packs import TreeBatch, split_into_packs
from verl_tree.functional import expand
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.tree.row_keys import prompt_numbers, row_keys, value_numbers

# The prompts are 1 2, 1 2, 1 2 3 and, of a row without a response, 1 2.
ROWS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5], [1, 2]]
RESPONSE_LENS = np.array([3, 3, 2, 0])


def cut(rows: list[list[int]], response_lens: np.ndarray, *, sharing: str, capacity: int = 1000) -> TreeBatch:
    """Cut rows of which a loss reads all tokens but the first, whether they belong to a response or not."""
    tokens, offsets = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
    numbers = [prompt_numbers(offsets, response_lens=response_lens)] if sharing == "prompt" else []
    trained = np.ones(len(tokens), dtype=bool)
    trained[offsets[:-1]] = False
    return split_into_packs(
        tokens,
        keys=row_keys(tokens, *numbers),
        offsets=offsets,
        trained=trained,
        capacity=capacity,
        config=TreeConfig(relay="never"),
        cost_model=CostModel.prior(),
    )


def test_numbers_differ_where_responses_begin() -> None:
    offsets, tokens = np.cumsum([0, *map(len, ROWS)]), np.concatenate(ROWS)
    numbers = prompt_numbers(offsets, response_lens=RESPONSE_LENS)
    assert numbers.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 3, 0, 0, 0]
    # Seven ids, so the 3 of row 0 is 10, that of row 1 is 17, and the 4 of row 2 is 25.
    assert row_keys(tokens, numbers).tolist() == [1, 2, 10, 4, 5, 1, 2, 17, 4, 6, 1, 2, 3, 25, 5, 1, 2]


def test_rows_of_one_value_share_and_their_numbers_stand_at_their_first_tokens() -> None:
    offsets = np.array([0, 2, 3, 5, 6])
    assert value_numbers(offsets, values=[0.5, 1.0, 0.5, 2.0]).tolist() == [0, 0, 1, 0, 0, 2]


@pytest.mark.parametrize("largest", [3, 1 << 40])
def test_keys_are_equal_exactly_where_ids_and_all_numbers_are(largest: int) -> None:
    """Of 1 << 40 in three columns a product would exceed 64 bits."""
    columns = np.random.default_rng(0).integers(0, 3, (3, 200)) * (largest // 3)
    keys = row_keys(*columns)
    of_pairs = (columns[:, :, None] == columns[:, None, :]).all(axis=0)
    assert np.array_equal(keys[:, None] == keys[None, :], of_pairs)
    assert 3 < len(np.unique(keys)) < 200


def test_prompts_are_shared_and_responses_are_not() -> None:
    batch = cut(ROWS, RESPONSE_LENS, sharing="prompt")
    (micro,) = batch.micro_batches
    # 1 2, the 3 of the prompt of row 2, and the responses of 3, 3 and 2 tokens.
    assert batch.counts.num_tree_tokens == micro.layout.num_tokens == 2 + 1 + 3 + 3 + 2
    assert cut(ROWS, RESPONSE_LENS, sharing="full").counts.num_tree_tokens == 6
    flat = np.zeros(sum(map(len, ROWS)), dtype=np.int64)
    flat[micro.flat_index_F.numpy()] = micro.layout.token_ids_T[micro.layout.tree_index_F].numpy()
    assert flat.tolist() == np.concatenate(ROWS).tolist()


@pytest.mark.parametrize("capacity", [1000, 40])
def test_gradients_are_those_of_full_sharing(capacity: int) -> None:
    rng = np.random.default_rng(3)
    rows = [[7, 8, 9, *each] for each in random_sequences(rng, num_sequences=10, mean_len=4, vocab_size=20)]
    response_lens = np.array([rng.integers(1, len(row)) for row in rows])
    coefficient_F = torch.from_numpy(rng.standard_normal(sum(map(len, rows))))
    model = tiny_model().double()
    model.set_attn_implementation(ATTENTION_NAME)
    found, num_tokens = {}, {}
    for sharing in ("full", "prompt"):
        batch = cut(rows, response_lens, sharing=sharing, capacity=capacity)
        losses = []
        for micro in batch.micro_batches:
            plan = AttentionPlan.from_layout(micro.layout, backend="varlen")
            scores = tree_forward_log_probs(model, micro.layout, plan=plan)
            losses.append((coefficient_F[micro.flat_index_F] * expand(scores.log_probs_T, micro.layout)).sum())
        found[sharing] = gradients(model, torch.stack(losses).sum())
        num_tokens[sharing] = batch.counts.num_tree_tokens
    assert num_tokens["full"] < num_tokens["prompt"] < len(coefficient_F)
    assert found["full"].keys() == found["prompt"].keys()
    assert max(relative_error(found["prompt"][name], each) for name, each in found["full"].items()) < 1e-12
