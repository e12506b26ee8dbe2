"""Make the small model: a Qwen3 from random weights, taught by a scripted solver before any reinforcement learning.

Two stages of plain supervised steps. First the skill: sessions of a solver that is always right, until the model can
copy numbers to where they belong. Then the choice: sessions of a solver with mixed habits, so that sampled sessions
succeed now and then, since reinforcement learning needs successes and failures.

The weight matrices are trained with Muon: with AdamW alone the same model stays several times as long on a plateau on
which it does not copy.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from recipes.demo.leaves import Leaf
from recipes.demo.prepare import say
from recipes.demo.settings import Settings, WarmStartSettings
from verl_tree.functional import tree_log_probs

_RISE_STEPS = 20
_STEPS_PER_LINE = 50

Loss = Callable[[Qwen3ForCausalLM, Sequence[Leaf]], torch.Tensor]


def flat_loss(model: Qwen3ForCausalLM, leaves: Sequence[Leaf]) -> torch.Tensor:
    """Return the mean cross-entropy of the trained tokens, each leaf a padded row."""
    width = max(len(leaf.token_ids) for leaf in leaves)
    token_ids = torch.zeros((len(leaves), width), dtype=torch.long)
    trained = torch.zeros((len(leaves), width), dtype=torch.bool)
    for row, leaf in enumerate(leaves):
        token_ids[row, : len(leaf.token_ids)] = torch.tensor(leaf.token_ids)
        trained[row, : len(leaf.token_ids)] = torch.tensor(leaf.trained, dtype=torch.bool)
    # Padding is on the right and attention is causal: no mask is needed. Only trained tokens meet the vocabulary.
    hidden = model.model(input_ids=token_ids).last_hidden_state[:, :-1]
    is_target = trained[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[is_target]), token_ids[:, 1:][is_target])


def tree_loss(model: Qwen3ForCausalLM, leaves: Sequence[Leaf]) -> torch.Tensor:
    """Return the same loss, computed on token trees: faster where leaves share most of their tokens."""
    out = tree_log_probs(model, [leaf.token_ids for leaf in leaves])
    trained = [torch.tensor(leaf.trained[1:], dtype=torch.bool) for leaf in leaves]
    return -torch.cat([values[mask] for values, mask in zip(out.log_probs, trained, strict=True)]).mean()


def make_model(tokenizer: PreTrainedTokenizerFast, *, settings: WarmStartSettings, seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random fp32 weights, a function of the seed."""
    eos, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(eos, int)
    assert isinstance(padding, int)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
        initializer_range=settings.initializer_range,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=padding,
    )
    return Qwen3ForCausalLM(config)


def save_taught_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    settings: Settings,
    make_batch: Callable[[int, bool], Sequence[Leaf]],
    compute_loss: Loss = flat_loss,
) -> None:
    """Make a model, train it in the two stages and write it with its tokenizer as a Hugging Face model folder.

    Args:
        folder: Where to write.
        tokenizer: The model's tokenizer.
        settings: With a warm start.
        make_batch: Gives the leaves of step i, from 0, and is told whether it is a step of the first stage.
        compute_loss: What is minimised.
    """
    say("warm start of the model (once; kept for later runs)")
    warm = settings.warm_start
    assert warm is not None
    model = make_model(tokenizer, settings=warm, seed=settings.seed).train()
    optimizers = _make_optimizers(model, settings=warm)
    num_steps, start_s = warm.num_skilled_steps + warm.num_mixed_steps, time.perf_counter()
    for step in range(num_steps):
        leaves = make_batch(step, step < warm.num_skilled_steps)
        loss = _train_step(model, optimizers, compute_loss(model, leaves), rate=_rate(step, settings=warm))
        if (step + 1) % _STEPS_PER_LINE == 0 or step + 1 == num_steps:
            say(f"  step {step + 1} of {num_steps}: loss {loss:.3f}, {time.perf_counter() - start_s:.0f} s")
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rate(step: int, *, settings: WarmStartSettings) -> float:
    """Return the share of the peak learning rate: in each stage a short rise, then a cosine to a twentieth."""
    peak, num_steps = 1.0, settings.num_skilled_steps
    if step >= num_steps:
        peak, step, num_steps = settings.mixed_rate, step - num_steps, settings.num_mixed_steps
    return peak * (min(1.0, (step + 1) / _RISE_STEPS) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / num_steps))))


def _make_optimizers(model: Qwen3ForCausalLM, *, settings: WarmStartSettings) -> list[torch.optim.Optimizer]:
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    optimizers = [
        torch.optim.Muon(matrices, lr=settings.matrix_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _train_step(
    model: Qwen3ForCausalLM, optimizers: Sequence[torch.optim.Optimizer], loss: torch.Tensor, *, rate: float
) -> float:
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate
        optimizer.step()
    return loss.item()
