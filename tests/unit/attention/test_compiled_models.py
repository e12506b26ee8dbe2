"""Models under `torch.compile`: layers may be compiled and give the same numbers, whole models are refused."""

import pytest
import torch
from tiny_models import tiny_model
from tree_cases import DEEP, gradients

from verl_tree.functional import tree_log_probs

SEVEN_TOKENS = [[1, 2, 3, 4], [1, 2, 5], [6, 7]]
OTHER_SEVEN_TOKENS = [[1, 2, 3], [1, 4, 5], [6, 7]]


def scores_and_gradients(model, sequences, **options):
    out = tree_log_probs(model, sequences, **options)
    loss = sum((each * torch.arange(1, len(each) + 1)).sum() for each in out.log_probs)
    return [*(each.detach() for each in out.log_probs), *gradients(model, loss).values()]


def assert_same(got, want):
    assert len(got) == len(want) > 10
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.fixture
def graphs():
    """Collect what is compiled; graphs run as traced, so that no code is generated."""
    found = []
    torch._dynamo.reset()
    yield found, lambda graph, _inputs: found.append(graph) or graph.forward
    torch._dynamo.reset()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_compiled_layers_give_the_same_scores_and_gradients(is_checkpointed, graphs):
    found, backend = graphs
    model = tiny_model(num_hidden_layers=1)
    if is_checkpointed:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    cases = [(SEVEN_TOKENS, {}), (DEEP, {}), (DEEP, {"capacity": 7})]
    want = [scores_and_gradients(model, sequences, **options) for sequences, options in cases]
    for layer in model.model.layers:
        layer.compile(backend=backend)
    for (sequences, options), each in zip(cases, want, strict=True):
        assert_same(scores_and_gradients(model, sequences, **options), each)
    assert found


def test_another_forest_of_as_many_tokens_compiles_nothing(graphs):
    found, backend = graphs
    model = tiny_model(num_hidden_layers=1)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    tree_log_probs(model, SEVEN_TOKENS)
    num_graphs = len(found)
    assert num_graphs > 0
    tree_log_probs(model, OTHER_SEVEN_TOKENS)
    assert len(found) == num_graphs


def test_a_model_compiled_as_a_whole_is_refused_with_the_remedy():
    model = tiny_model(num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"compiled as a whole.*layer\.compile\(\)"):
        tree_log_probs(torch.compile(model, backend="eager"), DEEP)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled as a whole"):
        tree_log_probs(model, DEEP)
