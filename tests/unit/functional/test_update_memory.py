"""The memory of an update as computed from sizes, beside the peak of a real one: each phase in turn is the largest."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from verl_tree.attention import AttentionPlan, tree_attention
from verl_tree.attention.hf import ATTENTION_NAME, register
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.functional.memory import KeysAndValues, peak_bytes, probe_layout
from verl_tree.functional.model_size import ModelSize, Sharing
from verl_tree.functional.offload import offload_checkpoints
from verl_tree.functional.tiles import tile_modules
from verl_tree.functional.update_memory import Levers, Relay, largest, update_memory, waiting_bytes

CPU = torch.device("cpu")
NUM_TOKENS, MAX_PATH_LEN, CHUNK_SIZE = 1024, 256, 64
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
MANY_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
EXPERTS = {"hidden_size": 256, "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128}


class Elsewhere(saved_tensors_hooks):
    """Hooks that move tensors to memory that torch does not allocate."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.detach().view(torch.int16).numpy().copy(), self._unpack)

    @staticmethod
    def _unpack(stored) -> Tensor:
        return torch.from_numpy(stored).clone().view(torch.bfloat16)


def kernel_bytes(config: PretrainedConfig, plan: AttentionPlan) -> int:
    """Measure the backward pass of the CPU's attention alone."""
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    inputs = [torch.randn(NUM_TOKENS, each, config.head_dim).bfloat16().requires_grad_() for each in heads]
    out = tree_attention(*inputs, plan)
    gradient = torch.randn_like(out)
    return peak_bytes(lambda: torch.autograd.grad(out, inputs, gradient), device=CPU) // NUM_TOKENS


def make_model(config: PretrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config)


def make_update(config: PretrainedConfig, levers: Levers, plan: AttentionPlan) -> Callable[[], None]:
    """Return an update of a bfloat16 model, whose gradients are there before."""
    register()
    torch.manual_seed(0)
    model = make_model(config).bfloat16().train()
    model.set_attn_implementation(ATTENTION_NAME)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if levers.num_tiles is not None:
        tile_modules(model, num_tiles=levers.num_tiles)
    if levers.offloads:
        offload_checkpoints(model, moved=Elsewhere())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    layout = probe_layout(NUM_TOKENS, max_path_len=MAX_PATH_LEN)
    assert layout.num_tokens == NUM_TOKENS

    def update() -> None:
        scores = tree_forward_log_probs(model, layout, plan=plan, temperature=2.0, chunk_size=levers.chunk_size)
        scores.log_probs_T.sum().backward()

    return update


@pytest.mark.parametrize(
    ("phase", "changes", "levers"),
    [
        ("mlp", {"intermediate_size": 512}, Levers()),
        ("mlp", {"intermediate_size": 1024}, Levers(num_tiles=3)),
        ("attention", MANY_HEADS, Levers()),
        ("attention", {"num_hidden_layers": 6}, Levers(num_tiles=8, offloads=True)),
        ("head", {"vocab_size": 8192}, Levers()),
        ("head", {"vocab_size": 8192}, Levers(num_tiles=8, offloads=True)),
        ("mlp", EXPERTS, Levers()),
    ],
)
def test_the_peak_of_an_update_is_the_computed_one(phase: str, changes: dict[str, int], levers: Levers) -> None:
    """Measured: 1.00 to 1.03 of the computed bytes."""
    levers = Levers(num_tiles=levers.num_tiles, offloads=levers.offloads, chunk_size=CHUNK_SIZE)
    config = (Qwen3MoeConfig if changes is EXPERTS else Qwen3Config)(**TINY | changes)
    plan = AttentionPlan.from_layout(probe_layout(NUM_TOKENS, max_path_len=MAX_PATH_LEN), backend="varlen")
    computed = update_memory(
        ModelSize.of_model(config),
        NUM_TOKENS,
        state_bytes=0,
        levers=levers,
        kernel_bytes=kernel_bytes(config, plan),
    )
    assert max(("head", "mlp", "attention"), key=lambda name: getattr(computed, name)) == phase
    update = make_update(config, levers, plan)
    update()
    measured = peak_bytes(update, device=CPU)
    print("RATIO", measured / computed.total)
    assert 0.97 < measured / computed.total < 1.03, (measured / computed.total, computed)


def test_parameters_are_counted() -> None:
    dense, mixture = (Qwen3Config(**TINY | {"tie_word_embeddings": each}) for each in (False, True)), Qwen3MoeConfig
    for config in (*dense, mixture(**TINY | EXPERTS)):
        model, size = make_model(config), ModelSize.of_model(config)
        assert size.num_parameters == sum(each.numel() for each in model.parameters())
        of_mlp = sum(each.numel() for each in model.model.layers[0].mlp.parameters())
        router = size.num_experts * size.hidden
        assert of_mlp == (size.expert_parameters + router if size.num_experts else size.mlp_parameters)


SIZE = ModelSize(
    hidden=10, intermediate=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=5, vocabulary=100, is_tied=True
)
"""Twenty query dims and ten key dims."""


def test_bytes_by_hand() -> None:
    """What a layer keeps per token up to the output of attention, 396 bytes, is the sum that the first comment has."""
    # A norm of 10 keeps 60, its output 20, norms of 30 dims of heads 180. Attention gets 40 + 20 + 20, gives 40, and
    # keeps a log-sum-exp of four heads, 16.
    memory = update_memory(SIZE, 7, state_bytes=16)
    # A layer: 10 * (2 * 20 + 2 * 10) of attention, 30 of norms, 600 of the MLP. Embeddings 1000, last norm 10.
    assert memory.states == 16 * (3 * (600 + 30 + 600) + 1010)
    assert memory.checkpoints == 7 * (3 * 20 + 2 * 2 * 5)
    # The second norm and its output, the gradient of the layer's output; six numbers of 20 dims.
    assert memory.mlp == 7 * (396 + 60 + 20 + 20 + 6 * 2 * 20)
    # Gradients of both outputs, 20 and 40; those of 20 + 10 + 10 dims in six bytes.
    assert memory.attention == 7 * (396 + 60 + 6 * 40)
    # The last norm 60, three times 20; three tensors of logits of seven positions; a gradient of the weight.
    assert memory.head == 7 * (60 + 60) + 3 * 4 * 7 * 100 + 2 * 10 * 100
    assert memory.layer == memory.mlp
    assert memory.total == memory.states + memory.checkpoints + memory.head


def test_levers_by_hand() -> None:
    """In two tiles of four tokens and three: norms keep their input, the first one that which came from the host."""
    memory = update_memory(SIZE, 7, state_bytes=0, levers=Levers(num_tiles=2, offloads=True, chunk_size=2))
    kept = 20 + 20 + 60 + 120 + 16
    assert memory.checkpoints == 7 * 20
    assert memory.mlp == 7 * (kept + 20 + 40 + 20) + 4 * 240 + 6 * 600
    assert memory.head == 7 * (20 + 60) + 3 * 4 * 2 * 100 + 2000


def test_a_relay_adds_its_store_and_the_sums_of_its_context() -> None:
    plain = update_memory(SIZE, 7, state_bytes=0)
    for on_host in (False, True):
        relayed = update_memory(SIZE, 7, state_bytes=0, relay=Relay(30, on_host=on_host))
        size = KeysAndValues(dims=20, num_layers=3, dtype_bytes=2)
        assert relayed.relayed == size.relayed_bytes(30, trains=True, recomputes=True, on_host=on_host)
        assert relayed.attention - plain.attention == 30 * 8 * 10
        assert relayed.mlp == plain.mlp
        # Of a known spine of two paths it is the same, and of none only the copies of the context are left.
        known, none = (update_memory(SIZE, 7, state_bytes=0, relay=Relay(30, on_host, each)) for each in (60, 0))
        assert known == relayed
        assert none.relayed == 2 * 30 * 20 * 2


def test_gradients_that_wait_are_those_of_the_whole_model() -> None:
    assert waiting_bytes(SIZE, reduce_bytes=4) == 4 * (3 * 1230 + 1010)


def test_a_token_has_what_it_has_of_a_dense_mlp_of_each_of_its_experts() -> None:
    """Of two experts of 20: twice the six numbers of 20 dims, and four times 10 for each."""
    mixture = replace(SIZE, num_experts=5, experts_per_token=2)
    dense, sparse = (update_memory(each, 7, state_bytes=0) for each in (SIZE, mixture))
    assert sparse.mlp - dense.mlp == 7 * (6 * 2 * 20 + 2 * 4 * 2 * 10)
    assert (sparse.attention, sparse.head, sparse.checkpoints) == (dense.attention, dense.head, dense.checkpoints)


def test_what_ranks_share_by_hand() -> None:
    """A layer has 630 parameters, 600 of them outside attention's norms, and an MLP or expert of 600."""
    mixture = replace(SIZE, num_layers=4, num_experts=6, experts_per_token=2, is_tied=False)
    layer, experts, ends = 600 + 30 + 6 * 10, 6 * 600, 2 * 1000
    assert mixture.num_parameters == 4 * (layer + experts) + ends + 10
    assert mixture.met_parameters == 4 * (layer + 2 * 600)
    for num_experts, part in ((1, experts), (3, experts // 3)):
        sharing = Sharing(num_ranks=6, experts=num_experts)
        # Two layers and the gradients of one; embeddings, head and their gradients.
        assert sharing.gathered_bytes(mixture) == 2 * (3 * (layer + part) + 2 * ends)
        # Forward and backward: of what all ranks have five sixths, of a share of experts what those with the same lack.
        same = 6 // num_experts
        gathered = (4 * layer + ends + 10) * 5 // 6 + 4 * part * (same - 1) // same
        assert sharing.pass_bytes(mixture) == 4 * gathered
        # In each pass the gradients in float32, too.
        assert replace(sharing, waits=False).pass_bytes(mixture) == 8 * gathered
        assert sharing.part_of(mixture) is mixture
    # Twelve ranks: three pipelines of two stages, each of two ranks, the experts among the pipelines.
    sharing = Sharing(num_ranks=12, team=2, stages=2, experts=3, is_gathered=False)
    assert (sharing.num_parts, sharing.num_replicas) == (4, 3)
    assert sharing.part_of(mixture) == replace(mixture, num_layers=2, vocabulary=50)
    assert (sharing.gathered_bytes(mixture), sharing.pass_bytes(mixture)) == (0, 0)
    # Half of two layers and one end of the pipeline, which three ranks have; a sixth of the experts of two layers.
    shared, of_experts = 2 * layer // 2 + 50 * 10, 2 * experts // 6
    assert sharing.kept_bytes(mixture) == 6 * (shared + of_experts) + 4 * shared + 12 * of_experts
    more = sharing.kept_bytes(mixture, num_gradients=2) - sharing.kept_bytes(mixture)
    assert more == 4 * (shared + of_experts)
    without = sharing.kept_bytes(mixture, has_optimizer=False)
    assert without == 6 * (shared + of_experts)
    assert sharing.kept_bytes(mixture, shares_optimizer=False) == without + 12 * (shared + of_experts)


def test_mixtures_whose_layers_differ_have_no_size() -> None:
    settings = Qwen3MoeConfig(**TINY | EXPERTS).to_dict()
    assert ModelSize.of_settings(settings | {"mlp_only_layers": None}) == ModelSize.of_settings(settings) is not None
    for changes in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"n_shared_experts": 1}, {"is_moe": False}):
        assert ModelSize.of_settings(settings | changes) is None


def test_the_largest_that_fits() -> None:
    assert largest(lambda tokens: 3 * tokens <= 100, limit=1000) == 33
    assert largest(lambda _: True, limit=1000) == 1000
    assert largest(lambda _: False, limit=1000) == 0


def test_the_page_has_the_tables_that_the_benchmark_prints() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "memory.md").read_text()
    tables = runpy.run_path(str(root / "benchmarks" / "memory.py"))["tables"]()
    assert len(tables) == 5
    for title, table in tables.items():
        assert f"\n\n{table}\n" in page, f"{title}: run benchmarks/memory.py"
