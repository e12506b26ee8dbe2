"""Rows that disagree about the route of a token: which tokens fork, by hand, and rows that impose their own routes."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model

pytest.importorskip("verl")

from float64_mode import Float64
from process_groups import group_of_one
from replay_cases import (
    PROMPTS,
    RESPONSES,
    batch,
    drawn_routes,
    gradients_of,
    oracle,
    recorded,
    routed,
    save_mixtures,
)
from tree_cases import flat_scores, gradients, relative_error

from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.config import TREE_STRATEGY, TreeConfig
from verl_tree.cost.model import CostModel
from verl_tree.engine.routes.route_conflicts import RouteForks, route_numbers
from verl_tree.engine.routes.router_replay import MiniBatchRoutes, RouterReplay
from verl_tree.engine.rows.packs import split_into_packs
from verl_tree.functional.relayed import call_scores
from verl_tree.relay.calls import RelayCall
from verl_tree.testing.local_worker import local_worker
from verl_tree.testing.synthetic import random_forest
from verl_tree.trainer.worker import TreeTrainingWorker
from verl_tree.tree import TokenForest
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.row_keys import row_keys

TOLERANCE = 1e-5
"""Relative, float32 against float32."""


def forks_of(
    rows: Sequence[Sequence[int]], routes: Sequence[Sequence[Sequence[int]]], trained: Sequence[Sequence[int]]
) -> RouteForks:
    """Give the routes of rows numbers, with one layer and two experts of a token."""
    return RouteForks.of_rows(
        np.concatenate(rows),
        offsets=np.cumsum([0, *map(len, rows)]),
        trained=np.concatenate(trained).astype(bool),
        routes_FNk=np.concatenate([np.array(each, dtype=np.int16)[:, None] for each in routes]),
    )


def test_numbers_are_those_of_the_docstring():
    rows = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6]]
    routes = [[[1, 2], [3, 4], [1, 2], [5, 6]], [[2, 1], [3, 5], [1, 2], [7, 8]], [[1, 2], [6, 7]]]
    forks = forks_of(rows, routes, trained=[[0, 0, 0, 1], [0, 0, 0, 1], [0, 1]])
    # Of row 1 it is 6' that has another route.
    assert forks.number_F_all.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert forks.is_read_F_all.tolist() == [True, True, True, False] * 2 + [True, False]
    # Of 5 tokens, 6 has rows that disagree; what row 2 knows of it counts, too.
    assert (forks.counts.num_routed_tokens, forks.counts.num_route_conflicts) == (5, 1)


def test_rows_that_route_alike_share_behind_a_fork():
    """Rows 1 and 2 differ from row 0 at the first token, and row 2 from row 1 at the third."""
    rows = [[3, 4, 5, 6]] * 3
    routes = [[[0, 1]] * 4, [[2, 3], [0, 1], [0, 1], [0, 1]], [[3, 2], [0, 1], [2, 3], [0, 1]]]
    forks = forks_of(rows, routes, trained=[[0, 0, 0, 1]] * 3)
    numbers = forks.number_F_all.reshape(3, 4)
    assert numbers.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]
    forest = TokenForest.from_sequences(list(row_keys(np.array(rows).ravel(), numbers.ravel()).reshape(3, 4)))
    assert (forest.num_tokens, forest.num_roots) == (4 + 4 + 2, 2)


def test_an_unknown_route_that_is_read_forks_and_one_that_is_not_read_joins():
    """Zeros are routed by the weights; behind the last trained token nothing reads them."""
    rows = [[3, 4, 5], [3, 4, 5, 6]]
    known, unknown = [1, 2], [0, 0]
    routes = [[known, unknown, unknown], [known, known, known, unknown]]
    joined = forks_of(rows, routes, trained=[[0, 1, 0], [0, 0, 0, 1]])
    assert joined.number_F_all.tolist() == [0] * 7
    forked = forks_of(rows, routes, trained=[[0, 0, 1], [0, 0, 0, 1]])
    assert forked.number_F_all.tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert joined.counts.num_route_conflicts == forked.counts.num_route_conflicts == 0


def test_the_first_row_that_reads_a_token_keeps_its_key():
    """Row 0 does not read it and knows another route."""
    numbers = route_numbers(
        np.array([[7, 8], [1, 2], [2, 1], [3, 4]], dtype=np.int16)[:, None],
        tree_index_F=np.zeros(4, dtype=np.int64),
        num_tokens=1,
        is_read_F=np.array([False, True, True, True]),
    )
    assert numbers.tolist() == [0, 0, 0, 1]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Save a model, in a process group of this process."""
    with pytest.MonkeyPatch.context() as variables, group_of_one():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            variables.setenv(name, value)  # what verl's workers read
        yield save_mixtures(tmp_path_factory.mktemp("mixtures"))[0]


def make_worker(folder: str, *, capacity: int, **tree: str) -> TreeTrainingWorker:
    return local_worker(
        folder,
        strategy=TREE_STRATEGY,
        max_token_len=capacity,
        tree_options={"route_conflicts": "fork", **tree},
        router_replay="R3",
    )


def routes_that_disagree() -> list[torch.Tensor]:
    """Draw routes with which row 1 differs at its second and its last shared token, and does not know its third."""
    routes, others = drawn_routes(seed=4), drawn_routes(seed=5)
    routes[1][1] = others[1][1]
    routes[1][2] = 0
    routes[1][4] = others[1][4]
    routes[2][0] = 0  # what row 2 does not know the others do
    return routes


@pytest.mark.parametrize(
    ("capacity", "tree"), [(64, {}), (13, {"relay": "never"}), (4, {"relay": "always"}), (64, {"gate": "always"})]
)
def test_each_row_is_computed_under_its_own_routes(
    mixture: str, capacity: int, tree: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    """In one pack, in several, in sections, and flat: log-probs and gradients of rows that impose their own routes."""
    routes = routes_that_disagree()
    log_probs, _, wanted = oracle(mixture, routes)
    worker = make_worker(mixture, capacity=capacity, **tree)
    scores = recorded(worker, batch(routes, max_token_len=capacity))
    for row, found in enumerate(scores["log_probs"].unbind()):
        assert relative_error(found[len(found) - 1 - len(log_probs[row]) : -1], log_probs[row]) < TOLERANCE
    gradients = gradients_of(worker, batch(routes, max_token_len=capacity))
    errors = {name: relative_error(gradients[name], gradient) for name, gradient in wanted.items()}
    assert gradients.keys() == wanted.keys()
    assert max(errors.values()) < TOLERANCE, errors
    record_property("Qwen3-MoE | router replay", max(errors.values()))

    # Row 3 shares all that it has with row 0. Row 2 forks at its first token, row 1 at its second.
    counts = worker.engine.tree_counts
    num_tokens = [len(prompt) + len(response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    assert counts.num_tree_tokens == num_tokens[0] + (num_tokens[1] - 1) + num_tokens[2] + num_tokens[4]
    # By the ids: tokens 1 and 4 of the shared ones, of 17.
    assert counts.num_routed_tokens == 17
    assert counts.num_route_conflicts == 2


@pytest.mark.parametrize("seed", range(8))
def test_random_forests_with_random_conflicts_are_exact_in_float64(seed: int) -> None:
    """A third of the shared tokens have a row with another route or none; a third of the tokens is trained."""
    rng = np.random.default_rng(seed)
    rows = random_forest(300 + seed, num_leaves=8, mean_len=5, root_probability=0.1, vocab_size=VOCAB_SIZE)
    routes = [routes_of(rng, row, seed=seed) for row in rows]
    trained = [np.arange(len(row)) > 0 for row in rows]
    trained = [each & (rng.random(len(each)) < 1 / 3) for each in trained]
    trained[0][1:] = True  # A forest has a row that is read
    model = tiny_model("qwen3 moe")
    replay = RouterReplay.of_model(model)
    column = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    input_ids = torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    replayed = MiniBatchRoutes(replay, column, input_ids=input_ids, records=False)
    tokens, flat = (
        input_ids.values().numpy(),
        {"offsets": input_ids.offsets().numpy(), "trained": np.concatenate(trained)},
    )
    packs = split_into_packs(
        tokens,
        keys=row_keys(tokens, replayed.fork(tokens, **flat)),
        capacity=10_000,
        config=TreeConfig(gate="never"),
        cost_model=CostModel.prior(),
        **flat,
    )
    (micro,) = packs.micro_batches

    def compute(call: RelayCall, plan: AttentionPlan) -> torch.Tensor:
        return call_scores(model, call, micro.layout, plan=plan)

    with Float64():
        model.double().set_attn_implementation("eager")
        want = {}
        for row in micro.rows.tolist():  # Those that a loss reads
            with routed(model, routes[row], {}):
                want[row] = flat_scores(model, list(rows[row]))[0][trained[row][1:]]
        wanted = gradients(model, sum((each * each.detach()).sum() for each in want.values()))
        model.set_attn_implementation(ATTENTION_NAME)
        call = micro.calls(scores_own_tokens=False).sections[0]
        scores_K = replayed.around(compute, micro)(call, AttentionPlan.from_layout(micro.layout))[0]
        scores_T = scores_K.new_zeros(micro.layout.num_tokens).index_copy(0, torch.from_numpy(call.scored_K), scores_K)
        of_leaves = scores_T[micro.layout.tree_index_F].split(np.diff(micro.layout.leaf_offsets).tolist())
        got = {
            row: each[torch.from_numpy(trained[row])] for row, each in zip(micro.rows.tolist(), of_leaves, strict=True)
        }
        found = gradients(model, sum((each * each.detach()).sum() for each in got.values()))
    assert micro.layout.num_tokens < micro.layout.num_flat_tokens
    assert replayed.counts.num_route_conflicts > 0
    assert max(relative_error(got[row], want[row]) for row in want if len(want[row])) < 1e-12
    assert max(relative_error(found[name], gradient) for name, gradient in wanted.items()) < 1e-11


def routes_of(rng: np.random.Generator, row: Sequence[int], *, seed: int) -> torch.Tensor:
    """Draw routes of two layers, of which the first has no experts: mostly those that other rows have there."""
    routes = torch.zeros(len(row), 2, 2, dtype=torch.int16)
    for place in range(len(row)):
        of_path = np.random.default_rng([seed, *row[: place + 1]])
        drawn = rng if rng.random() < 0.1 else of_path
        if rng.random() > 0.05:
            routes[place, 1] = torch.from_numpy(drawn.choice(8, size=2, replace=False))
    return routes


def test_the_first_routes_would_be_others(mixture: str) -> None:
    """What the test above compares depends on the option."""
    routes = routes_that_disagree()
    _, _, wanted = oracle(mixture, routes)
    found = gradients_of(make_worker(mixture, capacity=64, route_conflicts="first"), batch(routes))
    assert max(relative_error(found[name], gradient) for name, gradient in wanted.items()) > 0.01


def test_rows_that_agree_share_as_ever(mixture: str) -> None:
    worker = make_worker(mixture, capacity=64)
    gradients_of(worker, batch(drawn_routes(seed=4)))
    assert worker.engine.tree_counts.num_tree_tokens == 17
    assert worker.engine.tree_counts.metrics()["tree/route_conflicts"] == 0
