"""Expansion and its gradient, the declared objectives for shared tokens, and the whole path outside verl."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from tree_cases import DEEP, flat_scores, gradients, layout_of, random_sequences, relative_error

from verl_tree.functional import expand, scale_gradient, shared_token_weights, tree_log_probs
from verl_tree.functional.expansion import SHARED_TOKEN_MODES
from verl_tree.packing import METHODS

# Tree tokens: 5 (leaves 0 1 2), 6 (leaves 0 1), 7 (leaf 0), 8 (leaf 1), 9 (leaf 2); leaves in DFS order 0 1 2.
SMALL = [[5, 6, 7], [5, 6, 8], [5, 9]]
TRAINED = torch.tensor([True, True, True, False, True, False, True, True])  # 5 6 7 | 5 6 8 | 5 9


def test_expand_gathers_and_its_gradient_sums_over_the_leaves():
    layout = layout_of(SMALL)
    values_T = torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9], requires_grad=True)
    values_F = expand(values_T, layout)
    assert torch.equal(values_F, torch.tensor([0.5, 0.6, 0.7, 0.5, 0.6, 0.8, 0.5, 0.9]))
    (gradient_T,) = torch.autograd.grad(values_F, values_T, torch.tensor([1.0, 2, 4, 8, 16, 32, 64, 128]))
    assert gradient_T.tolist() == [1 + 8 + 64, 2 + 16, 4, 32, 128]


def test_expand_with_weights_keeps_the_values_and_scales_the_gradient():
    layout = layout_of(SMALL)
    values_T = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    weight_F = torch.tensor([1.0, 0.5, 0, 0, 0.5, 1, 2, 1])
    values_F = expand(values_T, layout, gradient_weight_F=weight_F)
    assert torch.equal(values_F, expand(values_T, layout))
    (gradient_T,) = torch.autograd.grad(values_F.sum(), values_T)
    assert gradient_T.tolist() == [[3.0, 3.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_scale_gradient_is_the_identity_bit_for_bit():
    values = torch.randn(1000, requires_grad=True)
    assert torch.equal(scale_gradient(values, torch.full((1000,), 1 / 3)), values)


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("sum", [1, 1, 1, 1, 1, 1, 1, 1]),
        # 5 is trained by the leaves 0 and 2, 6 by 0 and 1.
        ("mean", [0.5, 0.5, 1, 0, 0.5, 0, 0.5, 1]),
        ("once", [1, 1, 1, 0, 0, 0, 0, 1]),
    ],
)
def test_shared_token_weights_by_hand(mode, want):
    assert shared_token_weights(layout_of(SMALL), TRAINED, mode).tolist() == want


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"tree.shared_tokens is 'max': use one of sum, mean, once"):
        shared_token_weights(layout_of(SMALL), TRAINED, "max")


@pytest.mark.parametrize("mode", SHARED_TOKEN_MODES)
def test_weights_of_a_tree_token_add_up(mode):
    """Over the leaves that train it: to their number, to one, to one."""
    for seed in range(10):
        layout = layout_of(random_sequences(np.random.default_rng(seed), num_sequences=20, mean_len=5))
        trained_F = torch.rand(layout.num_flat_tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
        weight_F = shared_token_weights(layout, trained_F, mode)
        num_training_T = torch.zeros(layout.num_tokens).index_add(0, layout.tree_index_F, trained_F.float())
        total_T = torch.zeros(layout.num_tokens).index_add(0, layout.tree_index_F, weight_F * trained_F)
        want_T = num_training_T if mode == "sum" else (num_training_T > 0).float()
        torch.testing.assert_close(total_T, want_T)
        assert (num_training_T > 1).any()
        assert (num_training_T == 0).any()


def test_the_worked_example_of_the_page():
    """docs/gradient_restoration.md: +1 and -1 on a shared token cancel, and a scaled first leaf would be -2."""
    layout = layout_of([[5, 6], [5, 7]])
    num_copies_T = layout.tree_index_F.bincount()
    assert num_copies_T.tolist() == [2, 1, 1]
    logp_T = torch.zeros(3, requires_grad=True)

    def gradients_of(advantages):
        advantage_F = torch.tensor(advantages).repeat_interleave(2)
        first_leaf_advantage_T = torch.tensor([advantages[0], *advantages])
        losses = (
            -(advantage_F * expand(logp_T, layout).exp()).sum(),
            -(num_copies_T * first_leaf_advantage_T * logp_T.exp()).sum(),
        )
        return [torch.autograd.grad(loss, logp_T)[0].tolist() for loss in losses]

    assert gradients_of([1.0, -1.0]) == [[0.0, -1.0, 1.0], [-2.0, -1.0, 1.0]]
    assert gradients_of([1.0, 1.0]) == [[-2.0, -1.0, -1.0]] * 2


def clipped_loss(log_probs):
    """PPO's clipped surrogate with signed advantages per leaf, a mean per trajectory, and clipping that is active."""
    generator = torch.Generator().manual_seed(0)
    terms = []
    for log_prob in log_probs:
        if not len(log_prob):
            continue
        advantage, *noise = torch.randn(1 + len(log_prob), dtype=torch.float64, generator=generator)
        ratio = (log_prob - log_prob.detach() + 0.3 * torch.stack(noise)).exp()
        terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
    return torch.stack(terms).mean()


@pytest.mark.parametrize(("capacity", "packing"), [(None, None), (12, "auto"), (12, None)])
@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_tree_log_probs_equals_the_flat_path(capacity, packing, backend):
    model = tiny_model()
    want = [*zip(*(flat_scores(model, sequence, temperature=0.8) for sequence in DEEP), strict=True)]
    got = tree_log_probs(
        model, DEEP, temperature=0.8, calculate_entropy=True, backend=backend, capacity=capacity, packing=packing
    )
    assert got.num_flat_tokens == sum(map(len, DEEP)) == 50
    assert got.num_tree_tokens == 21 if packing is None else got.num_tree_tokens > 21
    torch.testing.assert_close([got.log_probs, got.entropy], want, rtol=1e-10, atol=1e-10)
    got_gradients = gradients(model, clipped_loss(got.log_probs))
    want_gradients = gradients(model, clipped_loss(want[0]))
    for name, want_one in want_gradients.items():
        assert relative_error(got_gradients[name], want_one) < 1e-10, name
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_every_packing_restores_the_flat_gradient(method, seed):
    """Random forests, random capacities of one to three times the longest trajectory."""
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_sequences=int(rng.integers(6, 16)), mean_len=5)
    capacity = int(max(map(len, sequences)) * rng.uniform(1, 3))
    model = tiny_model(seed=seed)
    got = tree_log_probs(model, sequences, capacity=capacity, packing=method)
    want = [flat_scores(model, sequence)[0] for sequence in sequences]
    torch.testing.assert_close(got.log_probs, want, rtol=1e-10, atol=1e-10)
    trained = [index for index, sequence in enumerate(sequences) if len(sequence) > 1]
    got_gradients = gradients(model, clipped_loss([got.log_probs[index] for index in trained]))
    want_gradients = gradients(model, clipped_loss([want[index] for index in trained]))
    for name, want_one in want_gradients.items():
        assert relative_error(got_gradients[name], want_one) < 1e-10, name


def test_no_entropy_unless_asked():
    assert tree_log_probs(tiny_model(), [[1, 2]]).entropy is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_are_recomputed_after_the_call_still_see_the_tree(use_reentrant):
    """The implementation is restored before the backward pass; a recomputed layer must not fall back to it."""
    model = tiny_model().train()
    want = gradients(model, clipped_loss([flat_scores(model, sequence)[0] for sequence in DEEP]))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    checkpoint = model.model.layers[0]._gradient_checkpointing_func
    loss = clipped_loss(tree_log_probs(model, DEEP).log_probs)
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0]._gradient_checkpointing_func is checkpoint
    loss.backward()
    assert model.config._attn_implementation == "sdpa"
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, want[name]) < 1e-10, name


def test_models_that_cannot_honour_the_tree_are_refused_and_left_as_they_were():
    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=20, state_size=4))
    with pytest.raises(ValueError, match=r"MambaForCausalLM \(model type mamba\) has layers \(a recurrent state\)"):
        tree_log_probs(mamba, [[1, 2]])
    t5 = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=20))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        tree_log_probs(t5, [[1, 2]])
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    stretched = tiny_model("llama", rope_parameters=rope, max_position_embeddings=4)
    with pytest.raises(ValueError, match="RoPE of type dynamic"):
        tree_log_probs(stretched, [[1, 2], [1, 2, 3, 4, 5]])
    assert stretched.config._attn_implementation == "sdpa"


def test_a_backend_that_does_not_exist_leaves_the_model_as_it_was():
    model = tiny_model()
    with pytest.raises(ValueError, match="'flash' does not exist"):
        tree_log_probs(model, [[1, 2]], backend="flash")
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model.lm_head)


def test_a_mixture_that_balances_its_experts_gets_no_mask():
    """Its loss unpacks a mask of two dimensions; packs have none."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=32, **sizes, **heads, **experts)).eval()
    sequences = [[1, 2, 3, 4], [1, 2, 5]]
    for sequence, log_probs in zip(sequences, tree_log_probs(model, sequences).log_probs, strict=True):
        torch.testing.assert_close(log_probs, flat_scores(model, sequence)[0], rtol=0, atol=1e-5)


def test_bad_sequences_are_refused():
    with pytest.raises(ValueError, match="1"):
        tree_log_probs(tiny_model(), [[1, 2], []])
    with pytest.raises(ValueError, match=r"tree\.capacity .*, or set .* packing=None in tree_log_probs"):
        tree_log_probs(tiny_model(), [[1, 2, 3]], capacity=2, packing="auto")
    for packing in (None, "auto"):
        with pytest.raises(ValueError, match="capacity is 0"):
            tree_log_probs(tiny_model(), [[1, 2, 3]], capacity=0, packing=packing)


def test_no_sequences_give_nothing():
    got = tree_log_probs(tiny_model(), [], calculate_entropy=True, capacity=5)
    assert (got.log_probs, got.entropy, got.num_tree_tokens, got.num_flat_tokens) == ([], [], 0, 0)


@pytest.mark.parametrize("token_id", [97, 200, -1])
def test_an_id_without_an_embedding_is_refused_before_the_forward_pass(token_id):
    model = tiny_model(vocab_size=97)
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    message = rf"sequence 1 has the token id {token_id} at position 2, .* vocabulary of 97 tokens: give ids in 0\.\.96"
    with pytest.raises(ValueError, match=message):
        tree_log_probs(model, [[1, 2, 3], [1, 96, token_id, token_id], [token_id]])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}])
def test_the_vocabulary_is_that_of_the_embedding_also_resized_and_wrapped(options):
    model = tiny_model(vocab_size=97)
    model.resize_token_embeddings(100)
    wrapped = get_peft_model(model, LoraConfig(**({"target_modules": ["q_proj"]} | options), task_type="CAUSAL_LM"))
    assert len(tree_log_probs(wrapped.double(), [[1, 2, 99]]).log_probs[0]) == 2
    with pytest.raises(ValueError, match=r"the token id 100 at position 0, .* vocabulary of 100 tokens"):
        tree_log_probs(wrapped, [[1, 2], [100]])


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_errs_no_more_than_the_flat_path_does(seed):
    """Against float64 on the same, rounded weights; design invariant 1 allows 1.5 times the flat path's error."""
    rng = np.random.default_rng(seed)
    sequences = [row for row in random_sequences(rng, num_sequences=24, mean_len=12) if len(row) > 1]
    coefficients = [torch.from_numpy(rng.normal(size=len(row) - 1)) for row in sequences]
    low = tiny_model(seed=seed, initializer_range=0.1).bfloat16()
    exact = tiny_model(seed=seed, initializer_range=0.1)
    exact.load_state_dict({name: value.double() for name, value in low.state_dict().items()})

    def flat(model):
        return [flat_scores(model, row)[0] for row in sequences]

    def tree(model):
        return tree_log_probs(model, sequences).log_probs

    def error(model, compute):
        want, got = flat(exact), compute(model)
        losses = [
            sum((coefficient * scores.double()).sum() for coefficient, scores in zip(coefficients, each, strict=True))
            for each in (want, got)
        ]
        wanted, found = gradients(exact, losses[0]), gradients(model, losses[1])
        return (
            (torch.cat(got).double() - torch.cat(want)).norm().item(),
            sum((found[name].double() - wanted[name]).square().sum().item() for name in wanted) ** 0.5,
        )

    for of_flat, of_tree in zip(error(low, flat), error(low, tree), strict=True):
        assert 0 < of_tree <= 1.5 * of_flat, (of_tree, of_flat)
