"""What the Triton backend makes of a layer's options before any kernel runs; the GPU is a pretended one."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_tree.attention import AttentionPlan, ScoreOptions, self_test, triton_backend
from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.triton_configs import (
    FLOAT32_CONFIGS,
    HOPPER_CAPPED_CONFIGS,
    HOPPER_CONFIGS,
    SMALL_CONFIGS,
    choose_configs,
)

PLAN = AttentionPlan.from_subtree_end(torch.tensor([4, 2, 4, 4]))
WINDOW, CAP, SINKS = {"window": 2}, {"softcap": 30.0}, {"sinks_H": torch.zeros(8)}


@pytest.fixture
def on_gpu(monkeypatch):
    """Return queries and keys on a pretended GPU; what is self-tested goes into the list."""
    tested = []
    monkeypatch.setattr(triton_backend, "_is_installed", lambda: True)
    monkeypatch.setattr(triton_backend, "self_test_reasons", lambda *given: tested.append(given[-1]) or [])

    def tensors(*, capability=(9, 0), dtype=torch.bfloat16, head_dim=128):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        with FakeTensorMode():
            return [torch.empty(4, heads, head_dim, dtype=dtype, device="cuda") for heads in (8, 2, 2)]

    return tensors, tested


@pytest.mark.parametrize("count", range(4))
def test_every_combination_of_options_is_served_after_a_self_test_of_its_own(count, on_gpu):
    tensors, tested = on_gpu
    qkv = tensors()
    for chosen in itertools.combinations([WINDOW, CAP, SINKS], count):
        asked = {name: value for option in chosen for name, value in option.items()}
        options = ScoreOptions(0.3, **asked)
        assert triton_backend.not_supported_reasons(*qkv, PLAN, options=options) == []
        kernel = tested.pop()
        wanted = tuple(name in asked for name in ("window", "softcap", "sinks_H"))
        assert (kernel.is_windowed, kernel.is_capped, kernel.has_sinks) == wanted
        assert (kernel.head_dim, kernel.num_heads, kernel.num_kv_heads) == (128, 8, 2)


@pytest.mark.parametrize(
    ("case", "options", "table"),
    [
        ({}, {}, HOPPER_CONFIGS),
        ({}, WINDOW | SINKS, HOPPER_CONFIGS),
        ({}, CAP, HOPPER_CAPPED_CONFIGS),
        ({}, WINDOW | CAP, HOPPER_CAPPED_CONFIGS),
        ({"capability": (8, 0)}, CAP, SMALL_CONFIGS),
        ({"dtype": torch.float32}, CAP, FLOAT32_CONFIGS),
    ],
)
def test_softcaps_have_configurations_of_their_own_on_hopper(case, options, table, on_gpu):
    tensors, _ = on_gpu
    for head_dim, padded in ((64, 64), (96, 128), (256, 256)):
        q, *_ = tensors(head_dim=head_dim, **case)
        assert choose_configs(q, options=ScoreOptions(0.3, **options)) == table[padded]


def test_the_forest_of_the_self_test_has_every_kind_of_tile_under_its_window():
    plan = AttentionPlan.from_subtree_end(torch.tensor(self_test.subtree_ends(self_test.TREES)))
    config = HOPPER_CONFIGS[64].forward
    sizes = {"query_block": config.query_block, "key_block": config.key_block}
    tree, windowed = (BlockLists.of_plan(plan, **sizes, window=window).by_query for window in (None, self_test.WINDOW))
    num_full, num_full_in_window = (int((rows.rows_R4[:, 2] - rows.rows_R4[:, 1]).sum()) for rows in (tree, windowed))
    assert 0 < num_full_in_window < num_full
    assert len(windowed.indices) < len(tree.indices)
