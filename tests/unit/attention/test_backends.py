"""What every backend computes: a section of a forest against a full softmax under the whole forest's mask.

A section is any stretch of tokens behind the root path of its first one, its context. The whole forest is a section,
too, behind a context of no tokens.
"""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from attention_cases import (
    CPU_BACKENDS,
    Section,
    ids_of,
    leaves_for,
    naive_attention,
    outputs_and_gradients,
    random_qkv,
    worst_error,
)
from tiny_models import tiny_model
from tree_cases import DEEP, layout_of, random_sequences, relative_error

from verl_tree.attention import AttentionPlan, tree_attention, varlen_providers
from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.attention.pieces import cut_mask

# DEEP's paths are up to 9 tokens long.
OPTIONS = [{}, {"window": 2}, {"window": 6}, {"sinks": True}, {"window": 4, "sinks": True}]
DENSE_ONLY = [{"softcap": 0.7}, {"window": 3, "softcap": 1.5, "sinks": True}]


def assert_section_is_exact(section, forest_inputs, *, backend, window=None, softcap=None, sinks=False):
    """Output and every gradient, those of the context's keys and values too."""
    *qkv, grad_out = section.inputs(*forest_inputs)
    leaves = leaves_for({"sinks": sinks}, qkv)

    def naive(*inputs):
        return naive_attention(*inputs, visible_QT=section.visible_QT, softcap=softcap)

    def attend(q, k, v, *sinks_H):
        options = {"window": window, "softcap": softcap, "sinks": sinks_H[0] if sinks else None}
        return tree_attention(q, k, v, section.plan(), backend=backend, **options)

    want = outputs_and_gradients(naive, leaves, grad_out)
    got = outputs_and_gradients(attend, leaves, grad_out)
    assert [one.shape for one in got] == [one.shape for one in want]
    assert worst_error(got, want, grad_out=grad_out) < 1e-12


CASES = [*itertools.product(CPU_BACKENDS, OPTIONS), *(("dense", options) for options in DENSE_ONLY)]


def case_id(value):
    return value if isinstance(value, str) else ids_of(value) or "plain"


@pytest.mark.parametrize(("backend", "options"), CASES, ids=case_id)
def test_every_section_of_a_forest_is_exact(backend, options, monkeypatch):
    monkeypatch.setattr(varlen_providers, "MAX_CPU_WINDOW_QUERIES", 3)
    monkeypatch.setattr("verl_tree.attention.dense.QUERY_BLOCK_LEN", 4)
    layout = layout_of(DEEP)
    inputs = random_qkv(layout.num_tokens, num_groups=2)
    inside_nodes = 0
    for start, length in itertools.product(range(layout.num_tokens), (1, 5, layout.num_tokens)):
        end = min(start + length, layout.num_tokens)
        section = Section.of_layout(layout, start=start, end=end, window=options.get("window"))
        inside_nodes += start > 0 and bool(layout.subtree_end_T[start - 1] == layout.subtree_end_T[start])
        assert section.num_context == layout.position_T[start]
        assert_section_is_exact(section, inputs, backend=backend, **options)
    assert inside_nodes > 5


@pytest.mark.parametrize(("backend", "options"), CASES, ids=case_id)
@pytest.mark.parametrize("num_groups", [1, 2, 4, 7])
def test_random_forests_and_their_sections_are_exact(backend, options, num_groups, monkeypatch):
    """In one block of queries, and in blocks of a few."""
    rng = np.random.default_rng(num_groups)
    for mean_len in (2, 5, 11, 30):
        if mean_len > 2:
            monkeypatch.setattr(varlen_providers, "MAX_CPU_WINDOW_QUERIES", 6)
            monkeypatch.setattr("verl_tree.attention.dense.QUERY_BLOCK_LEN", 7)
        layout = layout_of(random_sequences(rng, num_sequences=int(rng.integers(1, 40)), mean_len=mean_len))
        inputs = random_qkv(layout.num_tokens, num_groups=num_groups, seed=mean_len)
        start, end = sorted(rng.choice(layout.num_tokens + 1, 2, replace=False).tolist())
        window = options.get("window") and options["window"] + int(rng.integers(20))
        for bounds in ((0, layout.num_tokens), (start, end)):
            section = Section.of_layout(layout, start=bounds[0], end=bounds[1], window=window)
            assert_section_is_exact(section, inputs, backend=backend, **(options | {"window": window}))


def test_what_a_plan_with_a_context_says():
    """Tokens 0 1 2 | 3 4 | 5 | 6 7: b and c are children of a, d of a, too. The section is 4 5 6 7, cut inside b.

    Its context is the path 0 1 2 3, so the plan holds all eight tokens, and run b is split where the context ends.
    """
    plan = AttentionPlan.from_subtree_end(np.array([8, 8, 8, 5, 5, 6, 8, 8]), num_context=4)
    assert (plan.num_tokens, plan.num_context, plan.num_queries, plan.max_path_len) == (8, 4, 4, 5)
    assert plan.position_T.tolist() == [0, 1, 2, 3, 4, 3, 3, 4]
    assert plan.num_visible_pairs == 5 + 4 + 4 + 5
    assert plan.context is None
    assert plan.runs.ranges() == [(0, 3, 8), (3, 4, 5), (4, 5, 5), (5, 6, 6), (6, 8, 8)]
    triangles, *rectangles = cut_mask(plan.runs)
    assert triangles == [((0, 1), ((4, 5),)), ((1, 2), ((5, 6),)), ((2, 4), ((6, 8),))]
    assert rectangles == [[((0, 4), ((0, 3),))], [((0, 1), ((3, 4),))]]


@pytest.mark.parametrize("seed", range(20))
def test_every_pair_of_a_section_is_in_exactly_one_piece(seed):
    """The pieces of a plan, written out, are the mask; so no pair is lost or counted twice."""
    rng = np.random.default_rng(seed)
    layout = layout_of(random_sequences(rng, num_sequences=25, mean_len=7))
    start, end = sorted(rng.choice(layout.num_tokens + 1, 2, replace=False).tolist())
    start = 0 if seed % 3 == 0 else start
    section = Section.of_layout(layout, start=start, end=end)
    plan = section.plan()
    count_QT = torch.zeros(section.visible_QT.shape, dtype=torch.int64)
    triangles, *rectangles = cut_mask(plan.runs)
    for piece in itertools.chain(triangles, *rectangles):
        query_L, (key_K,) = torch.arange(*piece.queries)[:, None], [torch.arange(*keys) for keys in piece.keys]
        count_QT[query_L, key_K] += (key_K <= query_L + section.num_context).long() if piece in triangles else 1
    assert torch.equal(count_QT, section.visible_QT.long())
    assert [query for piece in triangles for query in range(*piece.queries)] == list(range(plan.num_queries))
    assert plan.num_visible_pairs == int(section.visible_QT.sum())
    assert plan.position_T.tolist() == layout.position_T[section.token_T].tolist()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("has_context", [False, True])
def test_what_a_query_does_not_see_changes_nothing_bit_for_bit(backend, has_context):
    layout = layout_of(random_sequences(np.random.default_rng(3), num_sequences=30, mean_len=8))
    start = int(layout.position_T.argmax()) - 3 if has_context else 0  # on the longest path
    section = Section.of_layout(layout, start=start, end=layout.num_tokens)
    plan = section.plan(backend=backend)
    num_context = section.num_context
    assert (num_context > 10) == has_context
    q, k, v, grad_out = section.inputs(*random_qkv(layout.num_tokens, num_groups=2))
    before = tree_attention(q, k, v, plan)
    most_seen = num_context + int(section.visible_QT[:, num_context:].sum(0).argmax())
    for token in {0, max(num_context - 1, 0), num_context, most_seen, plan.num_tokens // 2, plan.num_tokens - 1}:
        moved = [x.detach().clone() for x in (q, k, v)]
        for x in moved[1:] if token < num_context else moved:
            x[token - num_context if x is moved[0] else token] += 3.0
        after = tree_attention(*moved, plan)
        sees = section.visible_QT[:, token]
        assert torch.equal(before[~sees], after[~sees])
        assert not torch.equal(before[sees], after[sees])
        # Backward, a query that does not see the token gives it no gradient, and one that does, some.
        for rows, is_zero in ((~sees, True), (sees, False)):
            of_rows = torch.autograd.grad(tree_attention(q, k, v, plan)[rows], (q, k, v), grad_out[rows])
            assert of_rows[0][~rows].abs().sum() == 0
            assert (of_rows[2][token].abs().max() == 0) == is_zero
            assert not is_zero or of_rows[1][token].abs().max() == 0  # where keys are alone, theirs is always zero


def test_a_context_out_of_place_is_refused():
    ends = np.array([4, 2, 4, 4])
    for num_context in (-1, 4):
        with pytest.raises(ValueError, match=f"num_context = {num_context} of 4 tokens: give a number from 0 on"):
            AttentionPlan.from_subtree_end(ends, num_context=num_context)
    with pytest.raises(ValueError, match=r"subtree_end\[1\] = 2, so the first query, token 2, does not see token 1"):
        AttentionPlan.from_subtree_end(ends, num_context=2)


def test_the_number_of_a_plan_counts():
    plan = AttentionPlan.from_subtree_end(torch.tensor([4, 4, 3, 4]), num_context=2)
    q, k, v, _ = random_qkv(4, num_groups=1)
    want = tree_attention(q[2:], k, v, plan.subtree_end_T, num_context=2)
    for num_context in (0, 2):
        assert torch.equal(tree_attention(q[2:], k, v, plan, num_context=num_context), want)
    with pytest.raises(ValueError, match="num_context=1, but the plan was built with 2"):
        tree_attention(q[2:], k, v, plan, num_context=1)
    with pytest.raises(ValueError, match=r"q must be \(T - num_context.* with T = 4, .* and num_context = 2"):
        tree_attention(q, k, v, plan)


class Relayed:
    """Puts earlier keys and values before those of the queries, as a store does, and remembers what it was given."""

    def __init__(self, before=()):
        self.before, self.given = dict(before), {}

    def extend(self, layer, key_QHD, value_QHD, /):
        self.given[layer] = (key_QHD, value_QHD)
        key_PHD, value_PHD = self.before.get(layer, (key_QHD[:0], value_QHD[:0]))
        return torch.cat((key_PHD, key_QHD)), torch.cat((value_PHD, value_QHD))

    def save_own(self, *_):
        return nullcontext()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss"])
def test_layers_of_transformers_take_the_context_from_the_plan(name):
    model = tiny_model(name)
    model.set_attn_implementation(ATTENTION_NAME)
    layout = layout_of(DEEP)

    def logits(token_Q, plan):
        ids, positions = layout.token_ids_T[token_Q][None], layout.position_T[token_Q][None]
        return model(ids, position_ids=positions, attention_mask=None, use_cache=False, tree_plan=plan).logits[0]

    first = Relayed()
    everything = torch.arange(layout.num_tokens)
    want = logits(everything, AttentionPlan.from_subtree_end(layout.subtree_end_T, context=first))
    for start in range(1, layout.num_tokens, 3):
        section = Section.of_layout(layout, start=start, end=layout.num_tokens)
        context_P = section.token_T[: section.num_context]
        context = Relayed((layer, (k[context_P], v[context_P])) for layer, (k, v) in first.given.items())
        got = logits(everything[start:], section.plan(context=context))
        assert relative_error(got, want[start:]) < 1e-6  # transformers computes some norms in float32
