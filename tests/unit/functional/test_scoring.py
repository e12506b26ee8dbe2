"""`score`: log-probs of continuations, against one flat sequence after another in float64."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from float64_mode import Float64
from tiny_models import VOCAB_SIZE, tiny_model
from tree_cases import random_sequences

from verl_tree.functional import score, score_batch, score_without, tree_log_probs
from verl_tree.tree import TokenForest

TOLERANCE = 1e-10
CONTEXT = [7, 3, 9, 4, 1]
# Two begin alike, two are equal, one has a single token.
CONTINUATIONS = [[8, 8, 2], [8, 8, 5, 6], [0], [12, 3], [12, 3], [8, 8, 2, 1, 1]]


def flat_log_probs(model, sequence, *, temperature=1.0):
    """Return the distribution after every token of a sequence, (len, V)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(sequence)]), use_cache=False).logits[0]
    return (logits / temperature).log_softmax(-1)


def flat_scores_of(model, context, continuation, *, temperature=1.0):
    before = flat_log_probs(model, [*context, *continuation], temperature=temperature)[len(context) - 1 : -1]
    return before[torch.arange(len(continuation)), torch.tensor(continuation)]


@contextmanager
def recorded(model) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of every call of the model, and how many positions the head gets."""
    num_tokens, num_projected = [], []
    forward = model.lm_head.forward

    def project(hidden):
        num_projected.append(hidden.shape[-2])
        return forward(hidden)

    handle = model.get_decoder().register_forward_pre_hook(
        lambda _module, _args, kwargs: num_tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.lm_head.forward = project
    yield num_tokens, num_projected
    handle.remove()
    del model.lm_head.forward


@pytest.mark.parametrize("capacity", [None, 3, 9])
def test_an_answer_without_each_span_of_its_context(capacity):
    """Overlapping spans, the first token, the last one, and two that leave the same context."""
    model, answer = tiny_model(), [8, 8, 2]
    context, spans = [7, 3, 9, 4, 4, 1, 5, 6], [(2, 5), (4, 7), (0, 1), (7, 8), (3, 4), (4, 5)]
    variants = [context, *(context[:start] + context[end:] for start, end in spans)]
    want = torch.stack([flat_scores_of(model, each, answer, temperature=0.7).sum() for each in variants])
    got = score_without(model, context, spans, answer, temperature=0.7, capacity=capacity)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert got[5] == got[6]


def test_an_answer_without_drawn_spans_runs_shared_tokens_once():
    model, rng = tiny_model(), np.random.default_rng(0)
    for _ in range(20):
        context, answer = rng.integers(0, VOCAB_SIZE, rng.integers(2, 40)), rng.integers(0, VOCAB_SIZE, 3)
        cuts = [sorted(rng.choice(len(context) + 1, 2, replace=False).tolist()) for _ in range(rng.integers(0, 5))]
        spans = [(start, end) for start, end in cuts if end - start < len(context)]
        variants = [context, *(np.delete(context, range(start, end)) for start, end in spans)]
        want = torch.stack([flat_scores_of(model, each.tolist(), answer.tolist()).sum() for each in variants])
        with recorded(model) as (num_tokens, _):
            got = score_without(model, context, spans, answer)
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
        forest = TokenForest.from_sequences([np.concatenate([each, answer[:-1]]) for each in variants])
        assert sum(num_tokens) == forest.num_tokens


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(1, 1)], r"spans has \(1, 1\) in a context of 5 tokens: give its start and its end"),
        ([(0, 1), (2, 6)], r"spans has \(2, 6\) in a context of 5 tokens"),
        ([(-1, 2)], r"spans has \(-1, 2\) in a context"),
        ([(0, 5)], r"spans has \(0, 5\), all of the context: a token must be left"),
    ],
)
def test_spans_that_cannot_be_left_out_are_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        score_without(tiny_model(), CONTEXT, spans, [1])


@pytest.mark.parametrize("capacity", [None, 3, 4, 9])
def test_all_tokens_of_continuations(capacity):
    model = tiny_model()
    got = score(model, CONTEXT, CONTINUATIONS, temperature=0.7, capacity=capacity)
    want = [flat_scores_of(model, CONTEXT, each, temperature=0.7) for each in CONTINUATIONS]
    torch.testing.assert_close(got.log_probs, want, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(got.sums, torch.stack([each.sum() for each in want]), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(got.means, torch.stack([each.mean() for each in want]), rtol=TOLERANCE, atol=TOLERANCE)
    assert model.config._attn_implementation == "sdpa"
    assert not got.log_probs[0].requires_grad


@pytest.mark.parametrize("capacity", [None, 4])
def test_last_tokens_and_labels(capacity):
    model = tiny_model("llama")
    got = score(model, CONTEXT, CONTINUATIONS, last=2, capacity=capacity)
    want = [flat_scores_of(model, CONTEXT, each)[-2:] for each in CONTINUATIONS]
    torch.testing.assert_close(got.log_probs, want, rtol=TOLERANCE, atol=TOLERANCE)
    got = score(model, CONTEXT, [*CONTINUATIONS, []], labels=[60, 0, 5], capacity=capacity)
    for one, continuation in zip(got.log_probs, [*CONTINUATIONS, []], strict=True):
        after = flat_log_probs(model, [*CONTEXT, *continuation])[-1]
        torch.testing.assert_close(one, after[[60, 0, 5]], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["llama", "qwen2 window"])
def test_drawn_batches(family, seed):
    """Contexts share tokens with each other, and are continuations of each other."""
    rng = np.random.default_rng(seed)
    model = tiny_model(family)
    batch = []
    for context in random_sequences(rng, num_sequences=4, mean_len=6):
        rest = random_sequences(rng, num_sequences=int(rng.integers(0, 5)), mean_len=3)
        batch.append((context, [np.array(each) for each in rest]))
    capacity = [None, 5, 11][seed % 3]
    found = score_batch(model, batch, capacity=capacity)
    for (context, continuations), scores in zip(batch, found, strict=True):
        want = [flat_scores_of(model, context, each.tolist()) for each in continuations]
        torch.testing.assert_close(scores.log_probs, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_states_of_recurrent_layers_cross_the_sections(name):
    """In one call a hybrid gives the log-probs of `tree_log_probs`, which other tests compare with flat sequences."""
    model = tiny_model(name)
    with Float64():
        got = score(model, CONTEXT, CONTINUATIONS, capacity=3)
        want = tree_log_probs(model, [[*CONTEXT, *each] for each in CONTINUATIONS])
    of_continuations = [whole[len(CONTEXT) - 1 :] for whole in want.log_probs]
    torch.testing.assert_close(got.log_probs, of_continuations, rtol=TOLERANCE, atol=TOLERANCE)


def test_nothing_is_computed_that_nobody_reads():
    model = tiny_model()
    with recorded(model) as (num_tokens, num_projected):
        score(model, CONTEXT, [[token] for token in range(20)])
    assert num_tokens == [5]  # the context alone has the distribution of all twenty
    assert num_projected == [1]
    with recorded(model) as (num_tokens, num_projected):
        score(model, CONTEXT, [[1, 2, 3], [1, 2, 4], [9, 9, 9]], last=1)
    assert num_tokens == [5 + 2 + 2]
    assert num_projected == [2]
    long = list(range(60))
    with recorded(model) as (num_tokens, num_projected):
        score(model, long, [[1, 2], [3, 4]], labels=[0, 1], capacity=16)
    assert sum(num_tokens) == 60 + 4  # every token once
    assert max(num_tokens) <= 16
    assert sum(num_projected) == 2


@pytest.mark.parametrize("others", [[], [(CONTEXT, [[1], [2, 3]])]], ids=["alone", "beside another context"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_continuations(others, dtype):
    """They have no sums, of the dtype that others have."""
    model = tiny_model().to(dtype)
    *scored, none = score_batch(model, [*others, (CONTEXT, [])])
    assert none.log_probs == []
    assert none.sums.shape == none.means.shape == (0,)
    assert none.sums.dtype == none.means.dtype == torch.promote_types(dtype, torch.float32)
    for each in scored:
        assert each.sums.shape == (2,)
        assert each.sums.dtype == none.sums.dtype
    assert score_batch(model, []) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [[1]], {}), r"context 0 is empty, .* give at least the token that begins a text"),
        ((CONTEXT, [[1], []], {}), "continuation 1 of context 0 is empty: give a token to score"),
        ((CONTEXT, [[1]], {"last": 0}), "last=0: give a positive number"),
        ((CONTEXT, [[1]], {"last": 1, "labels": [1]}), "give one of both"),
        ((CONTEXT, [[1]], {"labels": []}), "labels is empty"),
        (
            (CONTEXT, [[1]], {"labels": [VOCAB_SIZE]}),
            rf"the token id {VOCAB_SIZE}, outside the vocabulary of {VOCAB_SIZE}",
        ),
        ((CONTEXT, [[-1]], {}), "the token id -1, outside the vocabulary"),
        (([*CONTEXT, 99], [[1]], {}), "sequence 0 has the token id 99 at position 5"),
        ((CONTEXT, [[1, 2]], {"capacity": 0}), "capacity"),
        ((CONTEXT, [[2**63]], {}), "continuation 0 of context 0 has dtype uint64: token ids are int32 or int64"),
        (([2**64], [[1]], {}), "context 0 has dtype object: token ids are int32 or int64"),
        ((CONTEXT, [[1]], {"labels": [2**63]}), "labels has dtype uint64: token ids are int32 or int64"),
        ((CONTEXT, [[1.5]], {}), "continuation 0 of context 0 has dtype float64: token ids are int32 or int64"),
        ((CONTEXT, [[[1]]], {}), r"continuation 0 of context 0 has shape \(1, 1\): give one-dimensional token ids"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    context, continuations, options = arguments
    with pytest.raises(ValueError, match=message):
        score(tiny_model(), context, continuations, **options)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, np.nan, np.inf, torch.tensor(0.7), "1", None], ids=repr)
@pytest.mark.parametrize("capacity", [None, 4])
def test_what_is_no_temperature_is_refused(temperature, capacity):
    """A tensor, too, where it would work by chance: in one pack it gets a gradient, in sections none."""
    model, message = tiny_model(), rf"temperature={re.escape(repr(temperature))}: (give a finite|a tensor gets no)"
    with pytest.raises(ValueError, match=message):
        tree_log_probs(model, [[*CONTEXT, *each] for each in CONTINUATIONS], temperature=temperature, capacity=capacity)
    with pytest.raises(ValueError, match=message):
        score(model, CONTEXT, CONTINUATIONS, temperature=temperature, capacity=capacity)
    with pytest.raises(ValueError, match=message):
        score_batch(model, [(CONTEXT, [])], temperature=temperature, capacity=capacity)
