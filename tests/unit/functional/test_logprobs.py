"""Scores of tree tokens by real tiny models in float64, against the same model on one flat sequence after another."""

import operator

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from tree_cases import DEEP, flat_scores, gradients, layout_of, random_sequences, relative_error

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, check_model, register
from verl_tree.functional import expand
from verl_tree.functional.logprobs import scored_tokens, tree_forward_log_probs
from verl_tree.functional.scorer import ScoredPairs

FAMILIES = ["qwen3", "llama", "qwen2"]


def tree_scores(model, sequences, **options):
    """Per sequence, in the order given: log-probs (and entropies) of all its tokens; and the raw scores."""
    layout = layout_of(sequences)
    model.set_attn_implementation(ATTENTION_NAME)
    scores = tree_forward_log_probs(model, layout, plan=AttentionPlan.from_layout(layout), **options)
    per_leaf = {}
    for name, values_T in (("log_probs", scores.log_probs_T), ("entropy", scores.entropy_T)):
        if values_T is not None:
            leaves = expand(values_T, layout).split(np.diff(layout.leaf_offsets).tolist())
            per_leaf[name] = [leaves[np.flatnonzero(layout.leaves == i)[0]][1:] for i in range(len(sequences))]
    return per_leaf, scores, layout


def signed_loss(log_probs, entropies, *, seed=0):
    """Add up terms with a coefficient of their own per (leaf, token), of either sign, not linear in the log-probs."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for log_prob, entropy in zip(log_probs, entropies, strict=True):
        coefficient, weight = torch.randn(2, len(log_prob), dtype=torch.float64, generator=generator)
        total = total + (coefficient * log_prob.exp()).sum() + (weight * entropy).sum()
    return total


def flat_reference(model, sequences, **options):
    model.set_attn_implementation("sdpa")
    scores = [flat_scores(model, sequence, **options) for sequence in sequences]
    return [log_probs for log_probs, _ in scores], [entropy for _, entropy in scores]


def assert_equals_flat(model, sequences, *, tolerance=1e-10, temperature=1.0, **options):
    """Scores and the gradients of every trained parameter."""
    want = flat_reference(model, sequences, temperature=temperature)
    want_gradients = gradients(model, signed_loss(*want))
    got, _, _ = tree_scores(model, sequences, temperature=temperature, calculate_entropy=True, **options)
    got_gradients = gradients(model, signed_loss(got["log_probs"], got["entropy"]))
    torch.testing.assert_close((got["log_probs"], got["entropy"]), want, rtol=tolerance, atol=tolerance)
    assert got_gradients.keys() == want_gradients.keys()
    for name, want_one in want_gradients.items():
        assert relative_error(got_gradients[name], want_one) < tolerance, name
    assert max(gradient.abs().max() for gradient in want_gradients.values()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_scores_and_gradients_equal_the_flat_path(family, tied):
    assert_equals_flat(tiny_model(family, tie_word_embeddings=tied), DEEP)


@pytest.mark.parametrize("sequences", [[[3, 1, 4, 1, 5]], [[3]], [[3], [3], [5]], [[2, 2], [2]]])
def test_the_smallest_forests(sequences):
    model = tiny_model()
    want, _ = flat_reference(model, sequences)
    got, _, _ = tree_scores(model, sequences)
    torch.testing.assert_close(got["log_probs"], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("target_modules", [["q_proj", "v_proj"], ["down_proj", "lm_head"]])
def test_lora(target_modules):
    lora = LoraConfig(r=4, target_modules=target_modules, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(), lora).double()
    assert_equals_flat(model, DEEP)


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_chunks_and_temperature_change_no_number(chunk_size, temperature):
    assert_equals_flat(tiny_model(), DEEP, chunk_size=chunk_size, temperature=temperature)


def test_temperature_by_position():
    model, layout = tiny_model(), layout_of(DEEP)
    temperature_T = torch.linspace(0.5, 1.5, layout.num_tokens)
    got, _, _ = tree_scores(model, DEEP, temperature=temperature_T, chunk_size=4)
    temperature_F = temperature_T[layout.tree_index_F].double()
    for leaf, sequence in enumerate(layout.leaves):
        by_position = temperature_F[layout.leaf_offsets[leaf] : layout.leaf_offsets[leaf + 1] - 1, None]
        model.set_attn_implementation("sdpa")
        want, _ = flat_scores(model, DEEP[sequence], temperature=by_position)
        torch.testing.assert_close(got["log_probs"][sequence], want, rtol=1e-10, atol=1e-10)


def test_the_first_token_of_every_branch_is_scored():
    """The bug this catches: one label per position scores one child of a branch point and forgets its siblings."""
    model, sequences = tiny_model(), [[4, 5, token] for token in (9, 3, 30, 8)]
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=torch.tensor([[4, 5]]), use_cache=False).logits[0, 1].log_softmax(-1)
    got, _, _ = tree_scores(model, sequences)
    for sequence, log_probs in zip(sequences, got["log_probs"], strict=True):
        torch.testing.assert_close(log_probs[1], logits[sequence[2]], rtol=1e-10, atol=0)


def pairs_of(layout, wanted_T=None):
    token_K = scored_tokens(layout, wanted_T)
    return ScoredPairs.of_scorers(layout.parent_T[token_K], layout.token_ids_T[token_K])


def test_scoring_plan_of_a_small_forest():
    """Tree 5 6 7 8 | 9 with a second root 4: tokens in preorder 5 6 7 8 9 4 (sorted leaves decide nothing here)."""
    layout = layout_of([[5, 6, 7, 8], [5, 6, 7, 9], [4]])
    tokens = layout.token_ids_T.tolist()
    wanted_T = torch.tensor([token in (8, 9, 6, 4) for token in tokens])
    plan = pairs_of(layout, wanted_T)
    assert [tokens[position] for position in plan.position_P] == [5, 7]  # the root 4 has no parent, 7 is not wanted
    read = [
        (tokens[plan.position_P[at]], int(label)) for at, label in zip(plan.pair_position_K, plan.label_K, strict=True)
    ]
    assert sorted(read) == [(5, 6), (7, 8), (7, 9)]
    assert len(pairs_of(layout).label_K) == 4


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_only_wanted_tokens_cost_a_projection(chunk_size):
    """Rows that reach the head, counted in the head itself: prompt and tool tokens cost none."""
    model, layout = tiny_model(), layout_of([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9], [1, 2, 3, 4, 7, 8, 5]])
    model.set_attn_implementation(ATTENTION_NAME)
    wanted_T = layout.position_T >= 4  # 5 6 | 7 8 9 | 5: parents 4, 5, 7, 8
    rows = []
    weight = model.lm_head.weight
    project = model.lm_head.forward
    model.lm_head.forward = lambda hidden: rows.append(hidden.numel() // weight.shape[1]) or project(hidden)
    scores = tree_forward_log_probs(
        model, layout, plan=AttentionPlan.from_layout(layout), wanted_T=wanted_T, chunk_size=chunk_size
    )
    assert sum(rows) == 4
    assert len(rows) == (1 if chunk_size is None else 2)
    assert torch.equal(scores.log_probs_T != 0, wanted_T)


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_wanted_tokens_keep_their_scores_and_gradients(fraction):
    model, layout = tiny_model(), layout_of(DEEP)
    wanted_T = torch.rand(layout.num_tokens, generator=torch.Generator().manual_seed(2)) < fraction
    _, all_scores, _ = tree_scores(model, DEEP, calculate_entropy=True)
    _, some_scores, _ = tree_scores(model, DEEP, calculate_entropy=True, wanted_T=wanted_T, chunk_size=2)
    keep_T = wanted_T & (layout.parent_T >= 0)
    coefficient_T = torch.randn(layout.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for scores in (all_scores, some_scores):
        losses.append((coefficient_T * keep_T * (scores.log_probs_T + 0.1 * scores.entropy_T)).sum())
    torch.testing.assert_close(some_scores.log_probs_T, all_scores.log_probs_T * keep_T, rtol=1e-12, atol=1e-12)
    want, got = (gradients(model, loss) for loss in losses)
    assert want.keys() == got.keys()
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-10, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_leak_through_a_model_bit_for_bit(dtype):
    """One token changes nothing on the paths that do not hold it, forward and in the gradients of their embeddings."""
    model, layout = (
        tiny_model().to(dtype),
        layout_of(random_sequences(np.random.default_rng(8), num_sequences=20, mean_len=9)),
    )
    model.set_attn_implementation(ATTENTION_NAME)
    visible_TT = layout.materialize()
    token = int((visible_TT.sum(0) * (layout.parent_T >= 0) * (visible_TT.sum(0) < layout.num_tokens // 2)).argmax())
    sees = visible_TT[:, token]
    assert sees.sum() > 3
    assert (~sees).sum() > 3

    def run(token_ids_T):
        embedded = model.get_input_embeddings()(token_ids_T).detach()[None].requires_grad_()
        logits = model(
            inputs_embeds=embedded,
            position_ids=layout.position_T[None],
            use_cache=False,
            tree_plan=AttentionPlan.from_layout(layout),
        ).logits[0]
        (gradient,) = torch.autograd.grad(logits[~sees].square().sum(), embedded)
        return logits, gradient[0]

    changed_T = layout.token_ids_T.clone()
    changed_T[token] = (changed_T[token] + 7) % VOCAB_SIZE
    (before, gradient_before), (after, gradient_after) = run(layout.token_ids_T), run(changed_T)
    assert torch.equal(before[~sees], after[~sees])
    assert torch.equal(gradient_before, gradient_after)
    assert gradient_before[sees].abs().max() == 0
    assert (before[sees] != after[sees]).any(1).all()


@pytest.mark.parametrize(
    ("config_class", "model_class", "key", "value"),
    [
        (Gemma2Config, Gemma2ForCausalLM, "final_logit_softcapping", 2.0),
        (CohereConfig, CohereForCausalLM, "logit_scale", 0.1),
        (GraniteConfig, GraniteForCausalLM, "logits_scaling", 3.0),
    ],
)
def test_models_that_change_their_logits_take_the_plain_path(config_class, model_class, key, value):
    register()
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB_SIZE, "pad_token_id": 0, key: value}
    if model_class is Gemma2ForCausalLM:
        settings["attn_logit_softcapping"] = None
    model = model_class(config_class(**settings)).eval()
    want, _ = flat_reference(model, DEEP)
    for ignores_logits_to_keep in (False, True):
        if ignores_logits_to_keep:
            replace_forward(model)
        got, _, _ = tree_scores(model, DEEP, chunk_size=4)
        torch.testing.assert_close(got["log_probs"], want, rtol=1e-5, atol=1e-5)


def replace_forward(model, change_hidden=lambda hidden: hidden):
    """Give the model a forward that hands its head what `change_hidden` makes of all positions."""
    forward, project = model.forward, model.get_output_embeddings()

    def ignoring(input_ids, **options):
        options.pop("logits_to_keep", None)
        return forward(input_ids=input_ids, **options)

    project.register_forward_pre_hook(lambda _module, args: (change_hidden(*args),))
    model.forward = ignoring


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_forward_that_ignores_logits_to_keep_scores_the_same(chunk_size):
    """As verl's patched forwards of vision models do: their head gets the hidden states of all tokens."""
    model = tiny_model()
    want, want_scores, layout = tree_scores(model, DEEP, calculate_entropy=True)
    want_gradients = gradients(model, signed_loss(want["log_probs"], want["entropy"]))
    replace_forward(model)
    got, scores, _ = tree_scores(model, DEEP, calculate_entropy=True, chunk_size=chunk_size)
    got_gradients = gradients(model, signed_loss(got["log_probs"], got["entropy"]))
    torch.testing.assert_close(scores.log_probs_T, want_scores.log_probs_T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores.entropy_T, want_scores.entropy_T, rtol=1e-12, atol=1e-12)
    assert want_gradients.keys() == got_gradients.keys()
    for name, want_one in want_gradients.items():
        assert relative_error(got_gradients[name], want_one) < 1e-12, name
    assert_equals_flat(model, DEEP, chunk_size=chunk_size, temperature=0.7)
    assert len(pairs_of(layout).position_P) < layout.num_tokens  # it had something to select


@pytest.mark.parametrize("wanted", [[], [3], range(6), range(21)])
def test_a_forward_that_ignores_logits_to_keep_is_read_at_the_wanted_positions_only(wanted):
    model = tiny_model()
    _, all_scores, layout = tree_scores(model, DEEP)
    replace_forward(model)
    wanted_T = torch.zeros(layout.num_tokens, dtype=torch.bool)
    wanted_T[list(wanted)] = True
    _, scores, _ = tree_scores(model, DEEP, wanted_T=wanted_T)
    torch.testing.assert_close(scores.log_probs_T, all_scores.log_probs_T * wanted_T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_rows", [0, 1, 14, 20, 22])
def test_any_other_number_of_projected_positions_is_refused_with_the_models_name(num_rows):
    model = tiny_model()
    layout = layout_of(DEEP)
    assert (layout.num_tokens, len(pairs_of(layout).position_P)) == (21, 15)
    replace_forward(model, lambda hidden: torch.cat([hidden, hidden], dim=1)[:, :num_rows])
    message = f"Qwen3ForCausalLM projects {num_rows} positions where 15 of 21 are wanted: its forward must honour"
    with pytest.raises(ValueError, match=message):
        tree_scores(model, DEEP)
    assert "forward" not in vars(model.lm_head)


def test_a_forward_that_does_not_run_its_head_is_refused():
    """Fused losses multiply by the head's weight themselves."""
    model = tiny_model()
    model.forward = lambda **_: CausalLMOutputWithPast(logits=torch.zeros(1, 1, 3))
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM ran its output head 0 times .*use_fused_kernels=false"):
        tree_scores(model, DEEP)


def change_logits(model, change):
    model.register_forward_hook(
        lambda _module, _args, output: operator.setitem(output, "logits", change(output.logits))
    )


@pytest.mark.parametrize("change", [lambda logits: logits * 2, lambda logits: logits.mul_(2)])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_unknown_change_of_the_logits_is_noticed_and_the_head_restored(mode, change):
    model = tiny_model()
    change_logits(model, change)
    with mode(), pytest.raises(ValueError, match="changes the logits behind its output head"):
        tree_scores(model, DEEP)
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("change", [torch.Tensor.clone, torch.Tensor.float, lambda logits: logits])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_logits_that_are_copied_or_cast_behind_the_head_are_no_change(mode, change):
    model = tiny_model()
    _, want, _ = tree_scores(model, DEEP)
    change_logits(model, change)
    with mode():
        _, got, _ = tree_scores(model, DEEP)
    torch.testing.assert_close(got.log_probs_T.double(), want.log_probs_T, rtol=1e-6, atol=1e-6)


def test_a_bad_chunk_size_is_refused():
    with pytest.raises(ValueError, match="chunk_size is 0"):
        tree_scores(tiny_model(), DEEP, chunk_size=0)


def run_layer(**keywords):
    """One attention layer of a model on two tokens."""
    model = tiny_model()
    model.set_attn_implementation(ATTENTION_NAME)
    plan = AttentionPlan.from_subtree_end(torch.tensor([2, 2]))
    settings = {"position_ids": torch.tensor([[0, 1]]), "use_cache": False, "tree_plan": plan} | keywords
    return model(input_ids=torch.tensor([[1, 2]]), **settings)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tree_plan": None}, "got no tree_plan"),
        ({"attention_mask": torch.ones(1, 2, dtype=torch.long)}, "attention_mask"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "attention_mask"),
        ({"is_causal": False}, "is_causal=False"),
        ({"indices": torch.zeros(1, 2, 2)}, "sparse attention"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"tree_plan": AttentionPlan.from_subtree_end(torch.tensor([3, 3, 3]))}, "T = 3"),
    ],
)
def test_a_layer_refuses_what_the_tree_mask_does_not_cover(keywords, message):
    with pytest.raises(ValueError, match=message):
        run_layer(**keywords)


def test_a_layer_refuses_dropout():
    with pytest.raises(ValueError, match=r"attention dropout 0\.5: load the model with an attention dropout of 0 "):
        tree_scores(tiny_model(attention_dropout=0.5).train(), [[1, 2, 3, 4, 5], [1, 2, 3, 7]])


@pytest.mark.parametrize("sliding_window", [4, 5])
def test_a_window_that_is_shorter_than_the_paths_and_one_that_is_not(sliding_window):
    model = tiny_model("qwen2", sliding_window=sliding_window, use_sliding_window=True, max_window_layers=1)
    assert_equals_flat(model, [[1, 2, 3, 4, 5], [1, 2, 3, 7]])


def test_check_model_names_the_reason():
    check_model(tiny_model(), max_path_len=10**6)
    check_model(tiny_model("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=1), max_path_len=5)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(
        ValueError, match="RoPE of type dynamic, which depends on the length of the sequence beyond 512"
    ):
        check_model(tiny_model("llama", rope_parameters=rope), max_path_len=513)
