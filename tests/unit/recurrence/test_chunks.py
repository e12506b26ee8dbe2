"""Chunks and seams: by hand, and against the paths of random forests."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hybrid_cases import chain_of_one_token_nodes
from tree_cases import layout_of, random_sequences

from verl_tree.attention import AttentionPlan
from verl_tree.recurrence.causal_conv import ConvSeams
from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.tree.runs import Runs

# 0 to 4 are a path; 5, 6-7 and 8-9 are below 4.
FORK = np.array([10, 10, 10, 10, 10, 6, 8, 8, 10, 10])


def test_the_example():
    chunks = TreeChunks.of_plan(AttentionPlan.from_subtree_end(FORK), size=4)
    assert chunks.token_MC.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
    assert chunks.slot_T.tolist() == list(range(10))
    assert chunks.read_slot_R.tolist() == [3, 4]
    assert chunks.entry_M.tolist() == [-1, 0, 0]
    assert chunks.chunk_bounds == (0, 1, 2, 3)
    assert chunks.read_bounds == (0, 1, 2, 2)
    assert chunks.before_MCC[1].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert chunks.before_MCC[2].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_small_trees_share_a_chunk():
    chunks = TreeChunks.of_plan(AttentionPlan.from_subtree_end(np.array([2, 2, 3, 5, 5])), size=8)
    assert chunks.token_MC[:, :5].tolist() == [[0, 1, 2, 3, 4]]
    assert chunks.num_steps == 1
    assert chunks.read_slot_R.tolist() == []


@pytest.mark.parametrize("size", [1, 4, 64])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_has_one_slot_and_its_path_before_it(size, seed):
    """A token's path is: what is before it in its chunk, and the path of the token that the chunk is entered after."""
    sequences = random_sequences(np.random.default_rng(seed), num_sequences=20, mean_len=1 + 5 * seed)
    if seed == 0:
        sequences = chain_of_one_token_nodes(50)
    layout = layout_of(sequences)
    chunks = TreeChunks.of_plan(AttentionPlan.from_layout(layout), size=size)
    token, before = chunks.token_MC, chunks.before_MCC
    assert (token.flatten()[chunks.slot_T] == torch.arange(layout.num_tokens)).all()
    assert before.diagonal(dim1=1, dim2=2).sum() == layout.num_tokens
    is_on_path = layout.materialize()
    for step in range(chunks.num_steps):
        for chunk in range(*chunks.chunk_bounds[step : step + 2]):
            entry = int(chunks.entry_M[chunk])
            assert (entry == -1) == (step == 0)
            above = torch.zeros(layout.num_tokens, dtype=torch.bool)
            if entry >= 0:
                read = chunks.read_bounds[step - 1] + entry
                assert read < chunks.read_bounds[step]
                slot = int(chunks.read_slot_R[read])
                assert chunks.chunk_bounds[step - 1] <= slot // size < chunks.chunk_bounds[step], "of the step before"
                above = is_on_path[token.flatten()[slot]]
            for slot in before[chunk].diagonal().nonzero().flatten().tolist():
                path = above.clone()
                path[token[chunk][before[chunk, slot]]] = True
                assert torch.equal(path, is_on_path[token[chunk, slot]])
    assert chunks.chunk_bounds[-1] == len(token)
    assert chunks.read_bounds[-1] == len(chunks.read_slot_R)


# The section 4..7 behind the context 0 1 2 3: 4 with the children 5 and 6 is below 3, and 7 is below 0.
SECTION = np.array([8, 7, 7, 7, 7, 6, 7, 8])


def plan_of_section(*cut_places):
    context = SimpleNamespace(cut_places=np.array(cut_places))
    return AttentionPlan.from_subtree_end(SECTION, num_context=4, context=context)


def test_a_section_behind_its_context():
    plan = plan_of_section(3)
    assert plan.runs.entered_E.tolist() == [0, 1]  # the runs 0 and 1 2 3
    assert [each.tolist() for each in plan.runs.behind_context()] == [[0, 1, 2, 3], [0, 1, 2, 3], [-3, 0, 0, -2]]
    chunks = TreeChunks.of_plan(plan, size=4)
    # The states of the context are those after 0 and after 3.
    assert chunks.num_entered == 2
    assert chunks.token_MC.tolist() == [[0, 1, 2, 2], [3, 3, 3, 3]]
    assert chunks.entry_M.tolist() == [1, 0]
    assert chunks.chunk_bounds == (0, 2)
    assert chunks.read_slot_R.tolist() == [4]
    assert chunks.read_bounds == (0, 1)
    assert chunks.left_L.tolist() == [0]


def test_a_section_of_several_steps():
    """In chunks of two: 4 and 5; after them 6; and 7. The state after 4 is read for 6 and for another call."""
    chunks = TreeChunks.of_plan(plan_of_section(0, 3), size=2)
    assert chunks.token_MC.tolist() == [[0, 1], [3, 3], [2, 2]]
    assert chunks.entry_M.tolist() == [1, 0, 0]
    assert chunks.chunk_bounds == (0, 2, 3)
    assert chunks.read_slot_R.tolist() == [0, 2]
    assert chunks.read_bounds == (0, 2, 2)
    assert chunks.left_L.tolist() == [0, 1]


def test_seams_of_a_section_behind_its_context():
    """Two inputs for each of the states after 0 and after 3 come before the section's own."""
    seams = ConvSeams.of_plan(plan_of_section(3), width=3)
    assert seams.num_entered == 2
    assert seams.seam_S.tolist() == [0, 1, 2, 3]
    assert seams.ancestor_SW.tolist() == [[2, 3, 4], [3, 4, 5], [3, 4, 6], [0, 1, 7]]
    assert seams.left_LU.tolist() == [[1, 7]]


def test_a_root_behind_a_context_of_another_tree():
    end = np.array([3, 2, 3, 5, 5])
    parents = [Runs.from_subtree_end(end, num_context=num).behind_context()[2].tolist() for num in (0, 1)]
    assert parents == [[-1, 0, 0, -1], [-2, -2, -1]]
    chunks = TreeChunks.of_plan(AttentionPlan.from_subtree_end(end, num_context=1), size=4)
    assert chunks.token_MC.tolist() == [[0, 1, 1, 1], [2, 3, 3, 3]]
    assert chunks.entry_M.tolist() == [0, -1]
    assert chunks.left_L is None


def test_short_nodes_leave_few_slots_empty():
    layout = layout_of(chain_of_one_token_nodes(400))
    chunks = TreeChunks.of_plan(AttentionPlan.from_layout(layout), size=64)
    assert layout.num_tokens / chunks.slot_T.new_tensor(chunks.token_MC.shape).prod() > 0.9
    assert chunks.num_steps < 800 / 64 + 2


@pytest.mark.parametrize("seed", range(4))
def test_seams(seed):
    layout = layout_of(random_sequences(np.random.default_rng(seed), num_sequences=20, mean_len=1 + 3 * seed))
    for width in (1, 2, 4):
        seams = ConvSeams.of_plan(AttentionPlan.from_layout(layout), width=width)
        seam_of = dict(zip(seams.seam_S.tolist(), seams.ancestor_SW.tolist(), strict=True))
        for token in range(layout.num_tokens):
            path = [token]
            while len(path) < width:
                path.insert(0, int(layout.parent_T[path[0]]) if path[0] >= 0 else -1)
            in_pack = [max(token - back, -1) for back in range(width - 1, -1, -1)]
            assert seam_of.get(token, in_pack) == path
            assert (token in seam_of) == (path != in_pack)
