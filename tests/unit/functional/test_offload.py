"""What leaves the device under gradient checkpointing: the input of every layer and nothing else, bit for bit."""

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from tree_cases import DEEP, gradients

from verl_tree.functional import tree_log_probs
from verl_tree.functional.offload import offload_checkpoints

NUM_DEEP = 21  # tree tokens of DEEP


class Moved(saved_tensors_hooks):
    """Hooks that store bytes, as host memory is other memory, and note what comes and goes."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []
        self.num_away = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | tuple[bytes, torch.dtype, torch.Size]:
        if tensor.numel() == 0:  # torch 2.11's checkpoints also keep a tensor without numbers
            return tensor
        self.shapes.append(tensor.shape)
        self.num_away += 1
        return tensor.detach().numpy().tobytes(), tensor.dtype, tensor.shape

    def _unpack(self, packed: Tensor | tuple[bytes, torch.dtype, torch.Size]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.num_away -= 1
        stored, dtype, shape = packed
        return torch.frombuffer(bytearray(stored), dtype=dtype).view(shape)


def make_model(*, use_reentrant: bool = False) -> torch.nn.Module:
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


def loss_of(model: torch.nn.Module, **options: object) -> Tensor:
    return torch.cat(tree_log_probs(model, DEEP, **options).log_probs).logsumexp(0)


def test_the_input_of_every_layer_is_moved_and_comes_back_once() -> None:
    want = gradients(plain := make_model(), loss_of(plain))
    moved = Moved()
    offload_checkpoints(model := make_model(), moved=moved)
    loss = loss_of(model)
    assert moved.shapes == [torch.Size([1, NUM_DEEP, 32])] * 2
    assert moved.num_away == 2
    got = gradients(model, loss)
    assert moved.num_away == 0
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def test_reentrant_checkpoints() -> None:
    want = gradients(plain := make_model(), loss_of(plain))
    moved = Moved()
    offload_checkpoints(model := make_model(use_reentrant=True), moved=moved)
    loss_of(model).backward()
    assert (len(moved.shapes), moved.num_away) == (2, 0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, want[name])


def test_a_relay_moves_the_inputs_of_one_section_at_a_time() -> None:
    """Sections run forward without gradient first, and then nothing is moved."""
    want = gradients(plain := make_model(), loss_of(plain, capacity=7))
    moved = Moved()
    offload_checkpoints(model := make_model(), moved=moved)
    loss = loss_of(model, capacity=7)
    assert moved.shapes == []
    got = gradients(model, loss)
    lens = [shape[1] for shape in moved.shapes]
    assert sum(lens) == 2 * NUM_DEEP  # two layers; every token once
    assert max(lens) <= 7
    assert moved.num_away == 0
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def test_on_a_cpu_torchs_hooks_change_nothing() -> None:
    want = gradients(plain := make_model(), loss_of(plain))
    offload_checkpoints(model := make_model())
    got = gradients(model, loss_of(model))
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def test_without_checkpoints_there_is_nothing_to_move() -> None:
    with pytest.raises(ValueError, match="enable_gradient_checkpointing=true"):
        offload_checkpoints(tiny_model())
