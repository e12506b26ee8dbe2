"""Every family with recurrent layers on trees in float64, against flat sequences.

The flat side runs delta rules and Mamba-2 token by token, and short convolutions as transformers computes them. Each
test says what it has shown, for the table of docs/models.md.
"""

import numpy as np
import pytest
import torch
from float64_mode import Float64
from hybrid_cases import assert_equals_flat, chain_of_one_token_nodes, flat_scores, flat_side, mamba_oracle
from peft import LoraConfig, get_peft_model
from tiny_models import DELTA_RULE, TITLES, VOCAB_SIZE, tiny_model
from transformers import DynamicCache
from tree_cases import DEEP, layout_of, random_sequences

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import tree_attention_implementation
from verl_tree.families import MIXERS, RECURRENT_TYPES
from verl_tree.functional import tree_log_probs
from verl_tree.recurrence import stand_ins
from verl_tree.recurrence.bind import RecurrentLayers, num_bound_mixers

OTHERS = ("olmo_hybrid", "lfm2", "lfm2_moe", "granitemoehybrid")
FAMILIES = (*DELTA_RULE, *OTHERS)


@pytest.mark.parametrize(
    "seeds", [range(0, 24, 4), pytest.param(range(24), marks=pytest.mark.long)], ids=["some", "all"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_forests_equal_the_flat_path(name, seeds, monkeypatch, record_property):
    monkeypatch.setattr(stand_ins, "CHUNK_SIZE", 8)  # nodes of up to some thirty tokens
    forests = [
        random_sequences(np.random.default_rng(seed), num_sequences=3 + seed % 9, mean_len=2 + seed) for seed in seeds
    ]
    log_probs, of_gradients, saved = assert_equals_flat(tiny_model(name), forests)
    assert saved > 40 * len(seeds)
    record_property(f"{TITLES[name]} | log-probs", log_probs)
    record_property(f"{TITLES[name]} | gradients", of_gradients)


@pytest.mark.parametrize("name", FAMILIES)
def test_chains_of_one_token_nodes_and_a_node_that_is_longer_than_a_chunk(name, monkeypatch):
    prompt = (np.arange(150) * 11 % VOCAB_SIZE).tolist()
    long = [[*prompt, 1, 2, 3], [*prompt, 4], prompt[:70], [*prompt[:70], 9, 9]]
    model = tiny_model(name)
    assert_equals_flat(model, [chain_of_one_token_nodes(24), long])
    monkeypatch.setattr(stand_ins, "CHUNK_SIZE", 5)
    assert_equals_flat(model, [chain_of_one_token_nodes(24)])


@pytest.mark.parametrize("name", FAMILIES)
def test_sections_equal_the_flat_path(name, monkeypatch, record_property):
    """From sections of two tokens, below the width of the convolution, to all but one token in the first."""
    monkeypatch.setattr(stand_ins, "CHUNK_SIZE", 5)
    model, found = tiny_model(name), []
    for seed in range(2):
        sequences = random_sequences(np.random.default_rng(seed), num_sequences=5 + seed, mean_len=2 + 4 * seed)
        num_tokens, flat = layout_of(sequences).num_tokens, flat_side(model, sequences)
        for capacity in (2, 5, max(num_tokens // 3, 2), num_tokens - 1):
            found.append(assert_equals_flat(model, [sequences], flat=flat, capacity=capacity)[1])
    record_property(f"{TITLES[name]} | relay", max(found))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing_and_lora(name, record_property):
    """Several packs, so that a layer that kept the last plan would recompute the first one wrongly."""
    flat, model = flat_side(tiny_model(name), DEEP), tiny_model(name).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, of_gradients, _ = assert_equals_flat(model, [DEEP], flat=flat, capacity=11, packing="heuristic")
    record_property(f"{TITLES[name]} | checkpointing", of_gradients)
    adapted = get_peft_model(tiny_model(name), LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.requires_grad_(parameter.dim() > 1)  # adapters and what they adapt
    _, of_gradients, _ = assert_equals_flat(adapted.double(), [DEEP])
    record_property(f"{TITLES[name]} | LoRA", of_gradients)
    assert num_bound_mixers(adapted) == 0


@pytest.mark.parametrize("chunk_size", [4, 256])
def test_transformers_own_mamba2_agrees_with_the_oracle(chunk_size):
    """So a comparison of engines, whose flat side runs it, compares with something right."""
    model = tiny_model("granitemoehybrid", mamba_chunk_size=chunk_size)
    sequences = random_sequences(np.random.default_rng(4), num_sequences=6, mean_len=9)
    with Float64():
        got = flat_scores(model, sequences)
        with mamba_oracle(model):
            want = flat_scores(model, sequences)
    assert max(map(len, sequences)) > 3 * 4, "several of the smaller chunks"
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["olmo_hybrid", "lfm2", "granite dense", "qwen3_5_text"])
def test_no_branch_sees_another_bit_for_bit(name):
    """Models without experts: other tokens in a batch of an expert may round differently, which is no leak."""
    model = tiny_model(name).float()
    layout = layout_of(random_sequences(np.random.default_rng(5), num_sequences=25, mean_len=7))

    def logits(token_ids_T):
        with torch.no_grad(), tree_attention_implementation(model, max_path_len=500):
            return model(
                input_ids=token_ids_T[None],
                position_ids=layout.position_T[None],
                use_cache=False,
                tree_plan=AttentionPlan.from_layout(layout, backend="dense"),
            ).logits[0]

    before = logits(layout.token_ids_T)
    is_on_path = layout.materialize()
    for token in range(0, layout.num_tokens, 9):
        changed = layout.token_ids_T.clone()
        changed[token] = (changed[token] + 1) % VOCAB_SIZE
        after = logits(changed)
        sees = is_on_path[:, token]
        assert torch.equal(after[~sees], before[~sees])
        assert (after[sees] != before[sees]).any(dim=-1).all()


@pytest.mark.parametrize("name", [*OTHERS, "qwen3_5_text"])
def test_binding_is_nested_and_restored(name):
    model = tiny_model(name)
    mixers = [module for module in model.modules() if type(module).__name__ in MIXERS]
    assert len(mixers) == 2
    assert model.config.model_type in RECURRENT_TYPES
    before = [vars(module).copy() for module in model.modules()]
    want = tree_log_probs(model, DEEP)
    with pytest.raises(ValueError, match="token id 99"):
        tree_log_probs(model, [[1, 99]])
    assert [vars(module) for module in model.modules()] == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    RecurrentLayers(model).bind()
    assert num_bound_mixers(model) == 2
    got = tree_log_probs(model, DEEP)
    assert all(map(torch.equal, got.log_probs, want.log_probs))
    assert num_bound_mixers(model) == 2


def call(model, **options):
    plan = AttentionPlan.from_layout(layout_of([[1, 2], [1, 3]]))
    return model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, **({"tree_plan": plan} | options))


@pytest.mark.parametrize("name", [*OTHERS, "qwen3_5_text"])
def test_a_lost_plan_a_skipped_layer_and_a_cache_are_refused(name):
    model = tiny_model(name)
    (mixer,) = [module for key, module in model.model.layers[2].named_modules() if type(module).__name__ in MIXERS]
    with tree_attention_implementation(model, max_path_len=3):
        call(model)
        with pytest.raises(ValueError, match=r"model.layers.0.\w+ got no tree_plan"):
            call(model, tree_plan=None)
        if name != "olmo_hybrid":  # whose layers fail at a cache of any other class than its own
            with pytest.raises(ValueError, match="pass use_cache=False"):
                call(model, past_key_values=DynamicCache(config=model.config))
        mixer.forward = lambda hidden_states, **_: hidden_states
        with pytest.raises(RuntimeError, match=r"model.layers.2.\w+ ran 0 times in one forward pass"):
            call(model)


def test_a_granite_without_mamba_is_served():
    """Published ones have the same class, and no layer with a state."""
    model = tiny_model("granitemoehybrid", layer_types=["attention"] * 3)
    scores = tree_log_probs(model, DEEP)
    with Float64():
        want, _ = flat_scores(model, DEEP)
    torch.testing.assert_close(scores.log_probs, want, rtol=1e-6, atol=1e-6)
