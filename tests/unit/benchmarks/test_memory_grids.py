"""What an update holds: bytes by hand, beside hooks on saved tensors, and the goal of the grids' report by hand."""

from pathlib import Path

import pytest
import report_memory
import torch
from harness import read_records
from held_bytes import held_bytes
from memory_grids import PATHS, Point, measure, new_model, points
from por_paths import Case
from por_rows import Rows, drawn_rows
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from verl_tree.functional.memory import peak_bytes
from verl_tree.testing.synthetic import star

DATA = Path(__file__).parents[3] / "docs" / "benchmarks" / "data" / "memory_grids.jsonl"


def test_held_bytes_by_hand() -> None:
    x = torch.zeros(1000, requires_grad=True)
    x.grad = torch.zeros(1000)

    def update() -> None:
        y = x.exp()  # saved
        scratch = torch.empty(5000)
        del scratch
        y.sum().backward()

    held = held_bytes(update)
    # The sum and its gradient are there when the backward pass starts.
    assert held.saved_bytes == 4 * (1000 + 2)
    assert held.peak_bytes == 4 * (1000 + 5000)
    assert held.largest == {"aten::empty": 4 * 5000, "aten::exp": 4 * 1000}


def test_of_several_backward_passes_the_one_that_starts_with_most_counts() -> None:
    weights = [torch.zeros(num, requires_grad=True) for num in (1000, 3000, 2000)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    def update() -> None:
        for weight in weights:
            weight.exp().sum().backward()

    assert held_bytes(update).saved_bytes == 4 * (3000 + 2)


def test_a_tree_holds_what_autograd_saves_and_its_peak_is_the_one_known() -> None:
    model = new_model()
    case = Case(
        model, drawn_rows(0.4, num_leaves=16, num_flat_tokens=512, vocab_size=model.vocab_size), micro_batch_tokens=512
    )
    path = case.path("tree")
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, Tensor] = {}  # by storage; held, so that no address comes twice

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            saved[address] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        path.gradients()
    by_hooks = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    held = held_bytes(path.gradients)
    # Beside them there are the scores and the layout.
    assert by_hooks <= held.saved_bytes < 1.01 * by_hooks
    assert held.peak_bytes == peak_bytes(path.gradients, device=torch.device("cpu"))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_tree_takes_its_share_of_the_flat_peak(is_checkpointed: bool) -> None:
    model = new_model()
    rows = Rows(star(4, prompt_len=64, branch_len=64, vocab_size=model.vocab_size), groups=[0] * 4)
    point = Point({"grid": "group", "group_size": 4, "prefix_len": 64, "ratio": 1}, rows)
    flat, tree, micro_batch, packs, relay = (
        measure(model, point, path, is_checkpointed=is_checkpointed) or {} for path in PATHS
    )
    # 1.5 paths are 192 tokens: one row, or the prompt and two branches.
    calls = [
        (each["num_tokens"], each["num_calls"], each["capacity"]) for each in (flat, micro_batch, tree, packs, relay)
    ]
    assert calls == [(512, 1, None), (512, 4, 192), (320, 1, None), (384, 2, 192), (320, 2, 192)]
    assert micro_batch["peak_bytes"] == pytest.approx(flat["peak_bytes"] / 4, rel=0.03)
    for record in (tree, packs, relay):
        assert 0.9 < report_memory.share(record, flat) < report_memory.GOAL
    # Keys and values of the prompt: two heads of 16 in four layers, and a gradient each.
    assert relay["store_bytes"] == 64 * (2 * 2 * 16) * 4 * (4 + 4)


def test_paths_that_are_the_tree_are_left_out() -> None:
    model = new_model()
    rows = Rows(star(2, prompt_len=64, branch_len=16, vocab_size=model.vocab_size), groups=[0] * 2)
    for path in ("packs/1.5", "relay/1.5"):
        assert measure(model, Point({}, rows), path, is_checkpointed=False) is None


def test_the_grids_have_their_points() -> None:
    every = list(points(flat_tokens=2048, prefix_part=8))
    assert len(every) == 6 + 3 * 3 * 4 + 2
    assert {each.rows.forest().num_flat_tokens for each in every[:6]} == {2048}
    assert every[-3].name == {"grid": "group", "group_size": 16, "prefix_len": 64, "ratio": 16}
    assert [len(row) for row in every[-3].rows.sequences] == [64 + 4] * 16


def test_the_share_by_hand() -> None:
    flat = {"peak_bytes": 1000, "num_flat_tokens": 100}
    # 40 of 100 tokens may have 400 bytes; 420 + 8 are there, 8 of them scores.
    tree = {"peak_bytes": 428, "expansion_bytes": 8, "num_tokens": 40, "capacity": None, "num_flat_tokens": 100}
    assert report_memory.share(tree, flat) == pytest.approx(1.05)
    relay = tree | {"peak_bytes": 328, "capacity": 20, "store_bytes": 100}
    assert report_memory.share(relay, flat) == pytest.approx(1.1)


def test_the_page_has_the_tables_of_the_data(tmp_path: Path) -> None:
    measured = report_memory.Measured(read_records(DATA))
    page = (DATA.parents[2] / "measurements.md").read_text()
    for title, table in report_memory.page_tables(measured).items():
        assert f"\n\n{table}\n" in page, f"{title}: run benchmarks/report_memory.py"
    report_memory.draw(measured, out=tmp_path / "grids.png")
    assert (tmp_path / "grids.png").read_bytes().startswith(b"\x89PNG")
