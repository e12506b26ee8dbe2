"""Where the fused log-probs refuse, without running them."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tree_cases import tiny_model

from verl_tree.functional.linear_arguments import LabelledPairs
from verl_tree.functional.linear_choice import fused_log_probs, not_supported_reasons

PAIRS = LabelledPairs(torch.arange(3), torch.arange(3))


def reasons_of(head, *, hidden_size=16, dtype=torch.float32):
    return not_supported_reasons(head, head.forward, torch.randn(3, hidden_size).to(dtype), PAIRS)


def test_a_cpu_takes_the_chunked_path():
    head = torch.nn.Linear(16, 40)
    assert reasons_of(head) == ["tensors are on cpu, the kernels run on CUDA only"]
    assert fused_log_probs(head, head.forward, torch.randn(3, 16), PAIRS) is None


@pytest.fixture
def interpreter(monkeypatch):
    """Make the CPU a device that does not refuse by itself. Nothing is run on it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.usefixtures("interpreter")
def test_plain_heads_are_served():
    head = torch.nn.Linear(16, 40)
    assert reasons_of(head) == []
    assert reasons_of(copy.deepcopy(head).half(), dtype=torch.float16) == []
    # fp32 parameters under autocast: both sides of the product are cast.
    with torch.autocast("cpu", dtype=torch.float16):
        assert reasons_of(head, dtype=torch.float16) == []


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "message"),
    [
        (torch.float64, torch.float64, "dtype torch.float64 is none of"),
        # The interpreter multiplies its bits as integers; on CUDA it is served.
        (torch.bfloat16, torch.bfloat16, "dtype torch.bfloat16 is none of float16, float32"),
        (torch.float32, torch.bfloat16, "dtype torch.bfloat16 and torch.float32 is none of"),
    ],
)
def test_dtypes_that_the_kernels_do_not_take(dtype, weight_dtype, message):
    assert message in reasons_of(torch.nn.Linear(16, 40).to(weight_dtype), dtype=dtype)[0]


@pytest.mark.usefixtures("interpreter")
def test_autocast_leaves_float64_as_it_is():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "dtype torch.float64 is none of" in reasons_of(torch.nn.Linear(16, 40).double(), dtype=torch.float64)[0]


@pytest.mark.usefixtures("interpreter")
def test_a_hidden_size_that_descriptors_do_not_take():
    assert "hidden size 20 is not a multiple of 8" in reasons_of(torch.nn.Linear(20, 40), hidden_size=20)[0]


def head_at(weight_VX):
    head = torch.nn.Linear(16, 40)
    head.weight = torch.nn.Parameter(weight_VX)
    return head


@pytest.mark.usefixtures("interpreter")
def test_memory_that_descriptors_do_not_take():
    """float32: 4 numbers are 16 bytes. A sliced weight is fine where its rows begin at such places."""
    whole = torch.randn(40 * 24)
    assert whole.data_ptr() % 16 == 0
    assert reasons_of(head_at(whole[4:].as_strided((40, 16), (20, 1), 4))) == []
    for strides, message in {(18, 1): "strides (18, 1)", (1, 40): "strides (1, 40)"}.items():
        assert message in reasons_of(head_at(whole.as_strided((40, 16), strides)))[0]
    moved = head_at(whole.as_strided((40, 16), (16, 1), 3))
    assert "the head's weight begins 12 bytes after" in reasons_of(moved)[0]
    head = torch.nn.Linear(16, 40)
    (reason,) = not_supported_reasons(head, head.forward, whole.as_strided((3, 16), (16, 1), 2), PAIRS)
    assert "the memory of the hidden states begins 8 bytes after" in reason
    # Copied, so its address does not matter.
    assert not_supported_reasons(head, head.forward, whole.as_strided((3, 16), (18, 1), 2), PAIRS) == []


@pytest.mark.usefixtures("interpreter")
def test_lora_on_the_head():
    lora = LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    head = get_peft_model(tiny_model().float(), lora).get_output_embeddings()
    assert "with a forward of its own" in reasons_of(head)[0]


class Scaled(torch.nn.Linear):
    """As quantised linear layers do: a subclass with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.usefixtures("interpreter")
def test_subclasses_and_instances_with_a_forward_of_their_own():
    assert "Scaled with a forward of its own" in reasons_of(Scaled(16, 40))[0]
    head = torch.nn.Linear(16, 40)
    head.forward = lambda hidden: 2 * torch.nn.functional.linear(hidden, head.weight)
    assert "with a forward of its own" in reasons_of(head)[0]


class PackedTensor(torch.Tensor):
    """As quantised weights are: a subclass of a tensor."""


@pytest.mark.usefixtures("interpreter")
def test_a_weight_that_is_no_plain_tensor():
    head = torch.nn.Linear(16, 40)
    head.weight = torch.nn.Parameter(head.weight.detach().as_subclass(PackedTensor))
    assert "the head's weight is a" in reasons_of(head)[0]
