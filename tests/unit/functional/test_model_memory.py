"""What fits into a memory: the bound by hand, peaks of known allocations, sizes of relayed keys and values."""

from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, tiny_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from tree_cases import DEEP, layout_of

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import tree_attention_forward
from verl_tree.functional.memory import (
    MAX_PROBE_TOKENS,
    KeysAndValues,
    Probe,
    largest_probe,
    leaving_no_trace,
    peak_bytes,
    probe_layout,
)

CPU = torch.device("cpu")


class Phases:
    """A memory of phases, each with its bytes and its bytes per token; it notes which packs it was asked to compute."""

    def __init__(self, *phases: tuple[int, int]) -> None:
        self.phases = phases
        self.asked: list[int] = []

    def peak(self, num_tokens: int) -> int:
        return max(fixed + per_token * num_tokens for fixed, per_token in self.phases)

    def measure(self, num_tokens: int) -> Probe:
        self.asked.append(num_tokens)
        return Probe(num_tokens, self.peak(num_tokens))


def test_probes_grow_to_what_is_sure_to_fit() -> None:
    # 256 tokens take 15,120, so 256 * 40,000 // 15,120 = 677 fit; these take 23,540, so 677 * 40,000 // 23,540 = 1,150
    # fit, and so on: 1,393, 1,471, towards the 1,500 that take 40,000.
    memory = Phases((10_000, 20))
    probe = largest_probe(memory.measure, memory_bytes=40_000)
    assert memory.asked == [256, 677, 1150, 1393, 1471]
    assert probe.capacity(40_000) == 1471 * 40_000 // 39_420 == 1492


def test_one_phase_that_depends_on_the_tokens_only_is_met_at_once() -> None:
    memory = Phases((0, 100))
    assert largest_probe(memory.measure, memory_bytes=50_000).capacity(50_000) == 500
    assert memory.asked == [256, 500]


def test_a_phase_that_takes_over_late_does_not_deceive() -> None:
    """The logits of a chunk hide the activations up to 2,000 tokens, and a line through two probes promises 190,000."""
    memory = Phases((20_000, 1), (0, 11))
    line = (memory.peak(1024) - memory.peak(256)) / 768
    assert (210_000 - memory.peak(256)) / line + 256 == 190_000
    probe = largest_probe(memory.measure, memory_bytes=210_000)
    assert probe.capacity(210_000) == 210_000 // 11 == 19_090


def test_the_capacity_fits_and_rises_with_the_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        fixed = torch.randint(0, 100_000, (3,), generator=generator)
        per_token = torch.randint(1, 300, (3,), generator=generator)
        memory = Phases(*zip(fixed.tolist(), per_token.tolist(), strict=True))
        before = 0
        for memory_bytes in range(memory.peak(256), 40 * memory.peak(256), memory.peak(256) // 3):
            probe = largest_probe(memory.measure, memory_bytes=memory_bytes)
            capacity = probe.capacity(memory_bytes)
            assert before <= capacity
            assert memory.peak(capacity) <= memory_bytes
            before = capacity
        assert max(memory.asked) <= MAX_PROBE_TOKENS
        assert before > 39 * 256


def test_a_first_probe_that_does_not_fit_is_the_last() -> None:
    memory = Phases((1000, 1))
    assert largest_probe(memory.measure, memory_bytes=1000) == Probe(256, 1256)
    assert largest_probe(memory.measure, memory_bytes=-5) == Probe(256, 1256)


def test_a_probe_that_comes_out_too_large_is_the_last_and_lowers_the_capacity() -> None:
    memory = Phases((0, 100))
    measured = [Probe(256, 25_600), Probe(500, 51_000)]  # 2 % more than it takes
    assert largest_probe(lambda _: measured.pop(0), memory_bytes=50_000).capacity(50_000) == 490
    assert memory.peak(490) <= 50_000


@pytest.mark.parametrize(("num_tokens", "max_path_len"), [(256, 4096), (1000, 64), (256, 2), (5000, 333)])
def test_a_probe_branches_and_keeps_to_the_longest_path(num_tokens: int, max_path_len: int) -> None:
    layout = probe_layout(num_tokens, max_path_len=max_path_len)
    assert 0.9 * num_tokens <= layout.num_tokens <= num_tokens
    assert int(layout.position_T.max()) < max_path_len
    num_trees = int((layout.parent_T == -1).sum())
    assert (layout.num_leaves, layout.num_nodes) == (7 * num_trees, 8 * num_trees)
    assert layout.num_tokens % (8 * num_trees) == 0


@pytest.mark.parametrize(
    ("num_tokens", "max_path_len", "num_trees", "node_len"),
    [(5000, 4096, 9, 65), (256, 4096, 1, 65), (900, 100, 2, 50)],
)
def test_a_probe_of_short_nodes(num_tokens: int, max_path_len: int, num_trees: int, node_len: int) -> None:
    layout = probe_layout(num_tokens, max_path_len=max_path_len, node_len=65)
    assert (layout.num_nodes, layout.num_tokens) == (8 * num_trees, 8 * num_trees * node_len)
    assert int(layout.position_T.max()) == 2 * node_len - 1


def test_the_peak_counts_what_is_allocated_at_once_above_what_was_there() -> None:
    held = [torch.empty(2**20, dtype=torch.uint8)]

    def run() -> None:
        first = torch.empty(3 * 2**10, dtype=torch.uint8)
        second = torch.empty(2 * 2**10, dtype=torch.uint8)
        del first
        held.clear()  # was there before
        third = torch.empty(2**11 + 2**9, dtype=torch.uint8)
        del second, third

    assert peak_bytes(run, device=CPU) == 5 * 2**10
    assert peak_bytes(lambda: None, device=CPU) == 0


def test_the_peak_counts_inside_of_operations_and_in_the_backward() -> None:
    weight = torch.ones(2**10, requires_grad=True)  # 4 KiB
    # exp keeps its result. In the backward the gradient of the product comes, then that of exp; scalars are few bytes.
    assert peak_bytes(lambda: (weight.exp() * 2).sum().backward(), device=CPU) // 2**10 == 12
    assert weight.grad is not None


def test_gradients_and_random_numbers_are_as_they_were() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    first.grad = gradient = torch.tensor([3.0, 4.0])
    state = torch.get_rng_state()
    with leaving_no_trace([first, second], device=CPU):
        assert first.grad is None
        (torch.rand(2) * (first + second)).sum().backward()
        assert first.grad is not None
    assert first.grad is gradient
    assert gradient.tolist() == [3.0, 4.0]
    assert second.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # A path has 10 * 6 numbers a layer. The store has two paths in three layers, in 2 bytes and 4 of gradient.
        # Three layers keep copies of the context, and there is the gradient of one: four times 60 numbers in 2 bytes.
        ({"trains": True, "recomputes": False}, 2 * 60 * 3 * 6 + 60 * 4 * 2),
        ({"trains": True, "recomputes": True}, 2 * 60 * 3 * 6 + 60 * 2 * 2),
        ({"trains": False, "recomputes": False}, 2 * 60 * 3 * 2 + 60 * 2),
        ({"trains": True, "recomputes": True, "on_host": True}, 2 * 60 * 2 * 6 + 60 * 2 * 2),
    ],
)
def test_bytes_of_a_relay(options: dict[str, bool], expected: int) -> None:
    assert KeysAndValues(dims=6, num_layers=3, dtype_bytes=2).relayed_bytes(10, **options) == expected


def deepseek() -> torch.nn.Module:
    """Make a DeepSeek-V3, whose latent attention has keys of 10 numbers and values of 12."""
    return tiny_model(
        "deepseek_v3",
        kv_lora_rank=8,
        q_lora_rank=8,
        head_dim=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=12,
        num_key_value_heads=4,
        first_k_dense_replace=2,
    )


@pytest.mark.parametrize("family", [*ATTENTION, "deepseek"])
def test_the_size_of_keys_and_values_is_what_layers_hand_to_attention(family: str) -> None:
    model: Any = deepseek() if family == "deepseek" else tiny_model(family)
    dims: list[int] = []

    def attend(module, query, key, value, mask, **options):
        dims.append(key[0, :, 0].numel() + value[0, :, 0].numel())
        return tree_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("noting_sizes", attend)
    AttentionMaskInterface.register("noting_sizes", lambda *_args, **_options: None)
    model.set_attn_implementation("noting_sizes")
    layout = layout_of(DEEP)
    model(
        input_ids=layout.token_ids_T[None],
        position_ids=layout.position_T[None],
        attention_mask=None,
        use_cache=False,
        tree_plan=AttentionPlan.from_layout(layout, backend="dense"),
    )
    size = KeysAndValues.of_model(model.config, dtype=torch.bfloat16)
    assert [size.dims] * size.num_layers == dims
    assert size.dtype_bytes == 2


@pytest.mark.parametrize(("num_ranks", "own_heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_a_rank_of_a_team_has_the_keys_and_values_of_its_own_heads(num_ranks: int, own_heads: int) -> None:
    config = Qwen3Config(num_attention_heads=32, num_key_value_heads=8, head_dim=128, num_hidden_layers=3)
    size = KeysAndValues.of_model(config, dtype=torch.bfloat16, num_ranks=num_ranks)
    assert size == KeysAndValues(dims=own_heads * 2 * 128, num_layers=3, dtype_bytes=2)


def test_recurrent_layers_have_no_keys_and_values() -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(
        num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, head_dim=16, layer_types=kinds * 2
    )
    size = KeysAndValues.of_model(config, dtype=torch.bfloat16)
    assert (size.dims, size.num_layers) == (2 * 2 * 16, 2)
