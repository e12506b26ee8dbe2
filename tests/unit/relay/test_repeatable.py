"""Models that draw random numbers are refused where tokens run twice, under whatever name they draw them."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB_SIZE, tiny_model
from tree_cases import DEEP, relative_error

from verl_tree.functional import tree_log_probs
from verl_tree.functional.tiles import tile_modules
from verl_tree.relay.repeatable import RANDOM_SETTING
from verl_tree.relay.run import RELAYED

GPT2 = {"vocab_size": VOCAB_SIZE, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "embd_pdrop": 0.0}
OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QUIET_OPT = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}

RANDOM = {
    "Seed-OSS": ("seed_oss", {"attention_dropout": 0.0}, r"residual_dropout=0\.1 draws"),
    "Starcoder2": ("starcoder2", {"residual_dropout": 0.2}, r"residual_dropout=0\.2 draws"),
    "Starcoder2, embeddings": (
        "starcoder2",
        {"embedding_dropout": 0.2},
        r"model\.embedding_dropout=0\.2 draws",
    ),
    "Mixtral": ("mixtral", MIXTRAL, r"mlp\.jitter_noise=0\.1 draws"),
    "MiniMax-M2": ("minimax_m2", MIXTRAL, r"mlp\.jitter_noise=0\.1 draws"),
    "PhiMoE, input": (
        "phimoe",
        {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.1},
        r"input_jitter_noise=0\.1 draws",
    ),
    "PhiMoE": (
        "phimoe",
        {"num_local_experts": 4, "router_jitter_noise": 0.0},
        "PhimoeForCausalLM draws random numbers in training mode",
    ),
    "GPT-2": ("gpt2", GPT2 | {"attn_pdrop": 0.0}, r"attn\.resid_dropout drops out 0\.1 of its"),
    "OPT": ("opt", OPT | QUIET_OPT | {"dropout": 0.1}, r"dropout=0\.1 draws"),
    "OPT, layers": ("opt", OPT | QUIET_OPT | {"layerdrop": 0.1}, r"layerdrop=0\.1 draws"),
}
"""Type of the model, settings, and what is said of it."""


class RandomGate(torch.nn.Module):
    """It draws and has no setting."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.rand_like(hidden) if self.training else hidden


@pytest.mark.parametrize("family", RANDOM)
def test_a_random_model_is_refused_by_name_where_tokens_run_twice(family: str) -> None:
    """In the forward pass if it is in training mode there, else in the backward pass; nowhere if nothing runs twice."""
    model_type, settings, said = RANDOM[family]
    model = tiny_model(model_type, **settings).train()
    remedy = rf"{said}.*a relayed tree computes tokens twice.*tree\.relay=never.*packing=\"auto\""
    with pytest.raises(ValueError, match=remedy):
        tree_log_probs(model, DEEP, capacity=7)
    with torch.no_grad():
        tree_log_probs(model, DEEP, capacity=7)
    tree_log_probs(model, DEEP, capacity=12, packing="auto")
    out = tree_log_probs(model.eval(), DEEP, capacity=7)
    model.train()
    with pytest.raises(ValueError, match=remedy):
        torch.cat(out.log_probs).sum().backward()


def test_lora_dropout_is_refused_and_a_model_that_draws_nothing_is_not() -> None:
    RELAYED.check(tiny_model().train())
    lora = LoraConfig(r=4, target_modules=["v_proj"], lora_dropout=0.05)
    adapted = get_peft_model(tiny_model(), lora).train()
    with pytest.raises(ValueError, match=r"lora_dropout\.default drops out 0\.05"):
        RELAYED.check(adapted)
    RELAYED.check(adapted.eval())


def test_draws_that_decide_nothing_are_not_refused() -> None:
    """OPT compares a number that it draws with a layerdrop of 0. Its gradients are those without a capacity."""
    model = tiny_model("opt", **OPT | QUIET_OPT).train()
    parameters = list(model.parameters())
    before = torch.get_rng_state()
    one, several = (
        torch.autograd.grad(torch.cat(tree_log_probs(model, DEEP, capacity=capacity).log_probs).sum(), parameters)
        for capacity in (None, 7)
    )
    assert not torch.equal(torch.get_rng_state(), before)
    assert max(map(relative_error, several, one)) < 1e-7  # OPT computes its attention in float32


def test_a_tiled_module_refuses_what_draws() -> None:
    """Seed-OSS drops out in its MLP by a function; noise of any other origin is found while it runs."""
    seed_oss = tiny_model("seed_oss", attention_dropout=0.0).train()
    tile_modules(seed_oss, num_tiles=2)
    with pytest.raises(ValueError, match=r"residual_dropout=0\.1 draws at random, and a tiled module runs twice"):
        tree_log_probs(seed_oss, DEEP)
    tree_log_probs(seed_oss.eval(), DEEP)
    noisy = tiny_model().train()
    for layer in noisy.model.layers:
        layer.mlp.act_fn = RandomGate()
    tile_modules(noisy, num_tiles=2)
    with pytest.raises(ValueError, match=r"Qwen3MLP draws random numbers .* set model\.tiled_mlp\.enabled=false"):
        tree_log_probs(noisy, DEEP)
    with torch.no_grad():
        tree_log_probs(noisy, DEEP)


def test_settings_have_names_that_are_known() -> None:
    """Every attribute that a model file of transformers drops out or multiplies noise by."""
    drawn = re.compile(
        r"dropout\w*\([^()]*?, (?:p=)?(?:float\()?self\.(\w+)"  # nn.functional.dropout(x, p=self.dropout, ...)
        r"|uniform_\(\s*1\.0 - self\.(\w+)"  # noise.uniform_(1.0 - self.jitter_noise, ...)
        r"|dropout_probability < self\.(\w+)"  # a layer is left out
    )
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    texts = [" ".join(file.read_text().split()) for file in files]
    names = {name for text in texts for groups in drawn.findall(text) for name in groups if name} - {"config"}
    assert names > {"residual_dropout", "jitter_noise", "input_jitter_noise", "moe_jitter_eps", "layerdrop", "dropout"}
    assert not [name for name in names if not RANDOM_SETTING.search(name)]
