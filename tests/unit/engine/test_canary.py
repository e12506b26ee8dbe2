"""The canary sees faults of every kind, keeps what it saw, and says nothing of rounding; on one rank of FSDP2.

`tests/e2e/test_engines.py` has it in every update of every engine, family and rank.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from process_groups import group_of_one
from tiny_models import tiny_model

pytest.importorskip("verl")

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from verl_tree.attention import hf
from verl_tree.commands.__main__ import main
from verl_tree.config import TREE_STRATEGY
from verl_tree.engine import canary
from verl_tree.engine.canary import DUE, METRIC, drawn_rows, gradient
from verl_tree.engine.routes.router_replay import ROUTES
from verl_tree.functional.rounding import LIMIT, Difference
from verl_tree.records import FOUND, read_trees, write_trees
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.testing.mutants import KINDS, mutated
from verl_tree.trainer.worker import TreeTrainingWorker

SHORT = {"stale_store": 12, "loses_last_queries": 12}
"""Capacities of faults that need sections; else the forest is one pack."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Save a model, in a process group of this process."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as variables, group_of_one():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            variables.setenv(name, value)  # what verl's workers read
        yield str(folder)


def make_worker(model: str, *, replay: str = "disabled", **tree: object) -> TreeTrainingWorker:
    worker = local_worker(model, strategy=TREE_STRATEGY, max_token_len=1000, tree_options=tree, router_replay=replay)
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


def batch(*, seed: int = 0, num_rows: int = 6) -> TensorDict:
    """Make rows of two prompts of 4 tokens, each of which branches again after 3 of 10 tokens of response."""
    rng = np.random.default_rng(seed)
    prompts, stems = rng.integers(1, 32, (2, 4)), rng.integers(1, 32, (2, 2, 3))
    rows = []
    for row in range(num_rows):
        response = [*stems[row % 2, row // 2 % 2], *rng.integers(1, 32, 7)]
        rows.append(
            {
                "prompts": torch.from_numpy(prompts[row % 2]),
                "responses": torch.tensor(response),
                "response_mask": torch.ones(10, dtype=torch.int64),
                "old_log_probs": torch.full((10,), -3.0),
                "advantages": torch.from_numpy(rng.normal(size=10)).float(),
            }
        )
    return batch_of_rows(rows, max_token_len=1000, global_batch_size=num_rows)


def update(worker: TreeTrainingWorker, data: TensorDict) -> float | None:
    """Compute an update without its step; return the metric."""
    with worker.engine.train_mode():
        worker.engine.forward_backward_batch(data.clone(), worker.loss_fn, forward_only=False)
    return worker.engine.canary.metrics.get(METRIC)


def updates(worker: TreeTrainingWorker, data: TensorDict, *, number: int) -> None:
    for _ in range(number):
        update(worker, data)


@pytest.mark.parametrize("name", [name for name, (part, _) in KINDS.items() if part not in ("routes", "backward")])
def test_it_sees_faults_of_every_kind_and_keeps_the_tree(
    model: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rows are drawn. What is kept has no fault any more when it is computed again."""
    worker = make_worker(model, capacity=SHORT.get(name, 1000), canary=6, dump_dir=str(tmp_path), relay="always")
    data = batch()
    assert update(worker, data) < 5
    if name == "sees_a_window":  # of 128 tokens, which no row of these reaches
        with mutated(worker.engine, name):
            assert update(worker, data) < 5
        return
    with (
        mutated(worker.engine, name),
        pytest.raises(ValueError, match=r"tree\.canary: log_probs of a row are .* apart") as error,
    ):
        update(worker, data)
    (path,) = tmp_path.glob("canary_*_rank_0.parquet")
    assert str(path) in str(error.value)
    (tree,) = read_trees(path)
    (found,) = [leaf.reward_extra_info[FOUND] for leaf in tree.leaves if FOUND in (leaf.reward_extra_info or {})]
    assert found["units"] > LIMIT
    assert max(abs(here - there) for here, there in zip(found["tree"], found["flat"], strict=True)) == pytest.approx(
        found["units"] * found["unit"]
    )
    assert main(["canary", str(path), "--model", model]) == 0
    out = capsys.readouterr().out
    assert out.count("row ") == 1
    assert out.endswith(": rounding\n")


@pytest.mark.parametrize("name", [name for name, (part, _) in KINDS.items() if part == "backward"])
@pytest.mark.parametrize("capacity", [12, 1000])
def test_it_sees_wrong_gradients_of_right_log_probs_and_keeps_the_tree(
    model: str,
    name: str,
    capacity: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"capacity": capacity, "canary_gradient_every": 1, "relay": "always", "dump_dir": str(tmp_path)}
    worker, data = make_worker(model, **options), batch()
    assert update(worker, data) < 5
    off = make_worker(model, capacity=capacity, canary_gradient_every=0, relay="always")
    with mutated(off.engine, name):
        assert update(off, data) < 5
    with mutated(worker.engine, name), pytest.raises(ValueError, match=r"the gradient of model\.\S+, of the scores"):
        updates(worker, data, number=4)  # one layer after the other
    (path,) = tmp_path.glob("canary_*_rank_0.parquet")
    (tree,) = read_trees(path)
    found = [leaf.reward_extra_info[FOUND] for leaf in tree.leaves if leaf.reward_extra_info]
    assert len(found) == min(gradient.MAX_ROWS, len(tree.leaves))
    assert all(each["units"] > LIMIT and each["layer"] == found[0]["layer"] for each in found)
    assert main(["canary", str(path), "--model", model]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"gradient of {found[0]['layer']}: ")
    assert line.endswith(": rounding")
    attend = hf.layer_attention
    monkeypatch.setattr(hf, "layer_attention", lambda *args, **options: _halved(attend(*args, **options)))
    assert main(["canary", str(path), "--model", model]) == 1
    assert capsys.readouterr().out.endswith(": NOT ROUNDING\n")
    # What Megatron has outside its layers has other names there.
    for leaf in tree.leaves:
        if leaf.reward_extra_info:
            leaf.reward_extra_info[FOUND]["layer"] = "0.module.module.embedding.word_embeddings.weight"
    write_trees(path, [tree])
    assert main(["canary", str(path), "--model", model]) == 1
    assert capsys.readouterr().out.startswith("gradient of all layers: ")


def _halved(out: torch.Tensor) -> torch.Tensor:
    return (out + out.detach()) / 2


def test_a_gradient_is_compared_in_the_first_update_and_then_in_every_so_many(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = []
    compare = drawn_rows.compare_gradient
    monkeypatch.setattr(
        drawn_rows, "compare_gradient", lambda *args, **options: _kept(compare(*args, **options), layers)
    )
    worker, data = make_worker(model, canary_gradient_every=2), batch()
    gradients = []
    for _ in range(5):
        with worker.engine.train_mode():
            worker.engine.forward_backward_batch(data.clone(), worker.loss_fn, forward_only=False)
            gradients.append([parameter.grad.full_tensor() for parameter in worker.engine.module.parameters()])
    names = [*gradient._layers(worker.engine.module)]
    assert layers == names[:3]
    # What is compared does not touch what the update has computed.
    for first, later in zip(gradients[0], gradients[1], strict=True):
        assert torch.equal(first, later)


def _kept(found: tuple[str, Difference], layers: list[str]) -> tuple[str, Difference]:
    layers.append(found[0])
    return found


@pytest.mark.parametrize("name", [name for name, (part, _) in KINDS.items() if part == "routes"])
def test_it_sees_wrong_routes_where_they_are_imposed(model: str, name: str, tmp_path: Path) -> None:
    del model  # whose process group this takes
    tiny_model("qwen3 moe").save_pretrained(tmp_path)
    worker, data = make_worker(str(tmp_path), replay="R2", canary=6, relay="always"), batch()
    recorded = data.clone()
    tu.assign_non_tensor(recorded, compute_loss=False)
    data[ROUTES] = worker.infer_batch(recorded)[ROUTES]
    assert update(worker, data) < 5
    with mutated(worker.engine, name), pytest.raises(ValueError, match=r"tree\.canary: log_probs of a row are"):
        update(worker, data)


def test_a_row_that_is_not_its_path_is_seen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a tree are compared with verl's rows, not with themselves."""
    worker, data = make_worker(model), batch()
    drawn = canary.DrawnRows

    def of_other_rows(engine, rows, given, **options):
        given = given.clone()
        given["input_ids"].values().add_(1)
        return drawn(engine, rows, given, **options)

    monkeypatch.setattr(canary, "DrawnRows", of_other_rows)
    with pytest.raises(ValueError, match="is not the path that stands for it in its tree"):
        update(worker, data)


def test_updates_are_the_same_with_it_and_without(model: str) -> None:
    """Also the second one, whose weights FSDP2 must not have kept from the flat passes of the first."""
    after = []
    for rows in (0, 1, 3):
        worker = make_worker(model, canary=rows)
        for seed in (0, 1):
            data = batch(seed=seed)
            tu.assign_non_tensor(data, disable_auto_offload=True)
            with worker.engine.train_mode():
                worker.train_batch(data)
            assert (METRIC in worker.engine.canary.metrics) == (rows > 0)
        after.append([each.full_tensor().detach().clone() for each in worker.engine.module.parameters()])
    for other in after[1:]:
        assert all(map(torch.equal, after[0], other))


def test_it_looks_when_it_is_due_and_not_at_other_calls(model: str) -> None:
    worker, data = make_worker(model), batch()
    tu.assign_non_tensor(data, **{DUE: False})
    assert update(worker, data) is None
    tu.assign_non_tensor(data, **{DUE: True})
    assert update(worker, data) is not None
    with worker.engine.eval_mode():
        worker.engine.forward_backward_batch(batch(), None, forward_only=True)


@pytest.mark.parametrize(
    ("family", "why"), [("qwen3 moe", "rounding may change the experts of a token"), ("qwen3", None)]
)
@pytest.mark.usefixtures("model")
def test_mixtures_are_not_compared_where_rounding_may_change_experts(
    family: str, why: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    canary._tell.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = update(make_worker(str(tmp_path)), batch())
    assert (found is None) == (why is not None)
    assert (f"tree.canary compares nothing: {why}" in caplog.text) == (why is not None)


def test_differences_are_in_units_of_rounding() -> None:
    flat, moved = torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([-1.001, -2.002, 0.0])
    found = Difference.of_scores(flat + torch.tensor([0.0, 0.01, 0.0]), flat, moved, dtype=torch.float32)
    assert found.place == 1
    assert found.size == pytest.approx(0.01, rel=1e-4)
    assert found.units == pytest.approx(5, rel=1e-3)
    sure = Difference.of_scores(flat, flat, flat, dtype=torch.bfloat16)
    assert (sure.size, sure.unit) == (0, 4 * 2**-23 + 2**-8)
    nan = torch.full((3,), torch.nan)
    assert Difference.of_scores(nan, nan, nan, dtype=torch.float32).is_rounding, "both sides agree"
    assert Difference.of_scores(-1 / flat.abs(), -1 / flat.abs(), flat, dtype=torch.float32).size == 0, "infinite ones"
    assert not Difference.of_scores(nan, flat, moved, dtype=torch.float32).is_rounding
    assert Difference.of_scores(flat[:0], flat[:0], flat[:0], dtype=torch.float32).is_rounding


def test_the_command_finds_a_model_that_gives_other_numbers(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of any stored tree rows are drawn; a wrong kernel is seen, and bad input is told."""
    path = Path("docs/benchmarks/data/trees/memory_qa.parquet")
    (tree, *_) = read_trees(path)
    small = tmp_path / "small.parquet"
    cut = [
        type(leaf)(leaf.session, leaf.leaf, leaf.token_ids % 32, leaf.prompt_len, leaf.is_trained, leaf.log_probs)
        for leaf in tree.leaves[:8]
    ]
    write_trees(small, [type(tree)(0, "small", tuple(cut))])
    assert main(["canary", str(small), "--model", model, "--rows", "3", "--capacity", "40"]) == 0
    assert capsys.readouterr().out.count(": rounding\n") == 3
    for arguments, message in (
        ([str(small), "--model", str(tmp_path)], "config.json"),
        ([str(small), "--model", model, "--rows", "0"], "--rows 0: give at least 1"),
        ([str(small), "--model", model, "--dtype", "int8"], "--dtype int8: give float32"),
        ([str(path), "--model", model], "outside the vocabulary of 61 tokens"),
    ):
        with pytest.raises(SystemExit):
            main(["canary", *arguments])
        assert message in capsys.readouterr().err
