"""MLPs and norms in tiles: the same numbers, fewer bytes, and no more runs of the MLP under gradient checkpointing."""

from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import ATTENTION, TINY_SETTINGS, tiny_model
from transformers import Qwen3Config, Qwen3ForCausalLM
from tree_cases import DEEP, gradients, layout_of, relative_error

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, register
from verl_tree.functional import tree_log_probs
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.functional.memory import peak_bytes
from verl_tree.functional.tiles import tile_modules

TOLERANCE = 1e-10
CPU = torch.device("cpu")


def loss_of(model, **options):
    out = tree_log_probs(model, DEEP, calculate_entropy=True, **options)
    log_prob, entropy = torch.cat(out.log_probs), torch.cat(out.entropy)
    return log_prob.logsumexp(0) + (log_prob.exp() * entropy).sum()


def result_of(model, **options):
    loss = loss_of(model, **options)
    return loss.item(), gradients(model, loss)


def assert_same(got, want, *, of_norms=TOLERANCE):
    assert got[0] == pytest.approx(want[0], rel=TOLERANCE)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        tolerance = of_norms if "norm" in name else TOLERANCE
        assert relative_error(got[1][name], gradient) < tolerance, name


@pytest.mark.parametrize("num_tiles", [1, 2, 4, 21, 1000])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
def test_scores_and_gradients_are_the_same(num_tiles, checkpointing):
    """The forest has 21 tokens, which 4 tiles do not divide, and of which 1000 tiles have one each at most."""
    model = tiny_model().train()
    want = result_of(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    tile_modules(model, num_tiles=num_tiles)
    # The relay asks autograd for the gradients. Reentrant checkpoints serve `backward` only.
    if checkpointing:
        loss = loss_of(model)
        loss.backward()
        assert_same((loss.item(), {name: each.grad for name, each in model.named_parameters()}), want)
    else:
        assert_same(result_of(model), want)


@pytest.mark.parametrize("capacity", [3, 7])
def test_relayed_forests(capacity):
    model = tiny_model()
    want = result_of(model)
    tile_modules(model, num_tiles=3)
    assert_same(result_of(model, capacity=capacity), want)


@pytest.mark.parametrize("family", [name for name in ATTENTION if "gpt-oss" not in name])
def test_families(family):
    model = tiny_model(family)
    want = result_of(model)
    tile_modules(model, num_tiles=4)
    # The norms of Gemma sum the gradients of their weights in float32, also in a float64 model.
    assert_same(result_of(model), want, of_norms=1e-6 if "gemma" in family else TOLERANCE)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_lora_that_comes_later(targets):
    model = tiny_model().train()
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    plain = tiny_model().train()
    torch.manual_seed(0)
    want = result_of(get_peft_model(plain, config))
    tile_modules(model, num_tiles=4)
    torch.manual_seed(0)
    wrapped = get_peft_model(model, config)
    wrapped.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped.enable_input_require_grads()
    got = result_of(wrapped)
    assert all("lora" in name for name in got[1])
    assert_same(got, want)


def counted_runs(model) -> Counter:
    """Return counts that rise with every run of an MLP's activation: one per tile."""
    runs = Counter()
    for name, module in model.named_modules():
        if name.endswith("act_fn"):
            module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    return runs


def test_a_checkpointed_mlp_runs_twice_in_all():
    """A layer that runs again for its backward pass stops in front of the MLP, which has a backward pass of its own."""
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tile_modules(model, num_tiles=4)
    runs = counted_runs(model)
    loss = loss_of(model)
    assert set(runs.values()) == {4}
    loss.backward()
    assert runs == {"model.layers.0.mlp.act_fn": 8, "model.layers.1.mlp.act_fn": 8}


def gradients_in_bf16(model):
    layout = layout_of(DEEP)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = tree_forward_log_probs(model, layout, plan=AttentionPlan.from_layout(layout, backend="dense"))
        return gradients(model, scores.log_probs_T.sum())


def test_autocast_is_that_of_the_forward_pass():
    """Float32 weights are cast to bfloat16 in both passes, the second time with gradient: nothing may be cached."""
    register()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY_SETTINGS))
    model.set_attn_implementation(ATTENTION_NAME)
    want = gradients_in_bf16(model)
    tile_modules(model, num_tiles=1)
    got = gradients_in_bf16(model)
    assert got.keys() == want.keys()
    # The gradients of the layers' inputs are added in another order, which one tile changes nowhere else.
    embedding = "model.embed_tokens.weight"
    assert relative_error(got.pop(embedding), want.pop(embedding)) < 1e-6
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def test_gradients_of_tiles_are_added_in_float32():
    """Sixty-four tiles in bfloat16 come as near to float64 as one; a sum in bfloat16 would be much farther."""
    torch.manual_seed(0)
    config = Qwen3Config(**TINY_SETTINGS | {"hidden_size": 64, "intermediate_size": 96})
    hidden_1TX, grad_1TX = torch.randn(2, 1, 1024, 64)
    errors = []
    exact = Qwen3ForCausalLM(config).double()
    state = {name: each.bfloat16() for name, each in exact.state_dict().items()}
    exact.load_state_dict(state)
    for num_tiles in (None, 1, 64):
        model = Qwen3ForCausalLM(config)
        model.load_state_dict(state)
        model = model.double() if num_tiles is None else model.bfloat16()
        if num_tiles is not None:
            tile_modules(model, num_tiles=num_tiles)
        mlp, dtype = model.model.layers[0].mlp, next(model.parameters()).dtype
        out = mlp(hidden_1TX.bfloat16().to(dtype))
        found = torch.autograd.grad(out, list(mlp.parameters()), grad_1TX.bfloat16().to(dtype))
        if num_tiles is None:
            want = found
        else:
            errors.append([relative_error(one.double(), two) for one, two in zip(found, want, strict=True)])
    one_tile, many = errors
    assert all(there < 1.2 * here for here, there in zip(one_tile, many, strict=True)), errors


def test_tiles_bound_what_an_mlp_takes():
    """Wide MLPs: what exceeds input, output and their gradients falls with the number of tiles."""
    torch.manual_seed(0)
    peaks = {}
    for num_tiles in (None, 8):
        config = Qwen3Config(**TINY_SETTINGS | {"intermediate_size": 1024})
        model = Qwen3ForCausalLM(config)
        if num_tiles is not None:
            tile_modules(model, num_tiles=num_tiles)
        mlp = model.model.layers[0].mlp
        for parameter in mlp.parameters():
            parameter.requires_grad_(False)
        hidden_1TX = torch.randn(1, 4096, 32, requires_grad=True)
        peaks[num_tiles] = peak_bytes(lambda mlp=mlp, hidden=hidden_1TX: mlp(hidden).sum().backward(), device=CPU)
    intermediate = 4096 * 1024 * 4
    assert peaks[None] > 4 * intermediate
    assert peaks[8] < 8 * intermediate / 8 + 4 * hidden_1TX.nbytes


def test_what_cannot_be_tiled_is_refused():
    with pytest.raises(ValueError, match=r"num_shards=0"):
        tile_modules(tiny_model(), num_tiles=0)
    experts = tiny_model("gpt-oss")
    tile_modules(experts, num_tiles=2)
    with pytest.raises(ValueError, match="not a tensor"):
        loss_of(experts)
    model = tiny_model().train()
    tile_modules(model, num_tiles=2)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    wrapped = get_peft_model(model, config)
    with pytest.raises(ValueError, match=r"drops out 0\.5"):
        loss_of(wrapped)
    with torch.no_grad():
        assert loss_of(wrapped.eval()).isfinite()
