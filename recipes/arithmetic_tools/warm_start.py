"""Makes the demo's model: a small Qwen3 from random weights, taught by the scripted solver before any RL.

Two stages of plain supervised steps. First the skill: sessions of a solver that is always right, until the
model can copy numbers to where they belong. Then the choice: sessions of a solver with mixed habits, so that
sampled sessions succeed now and then, since reinforcement learning needs successes and failures.

The weight matrices are trained with Muon: with AdamW alone the same model stays on a plateau, without copying,
several times as long.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipes.arithmetic_tools.settings import Habits, Settings, WarmStartSettings
from recipes.arithmetic_tools.solver import Leaf, Solver, trace_leaves
from recipes.arithmetic_tools.tasks import make_tasks
from recipes.arithmetic_tools.tools import OneArgumentTool

_RISE_STEPS = 20
_STEPS_PER_LINE = 50


def flat_loss(model: Qwen3ForCausalLM, *, leaves: Sequence[Leaf], padding: int) -> torch.Tensor:
    """Returns the mean cross-entropy of the trained tokens, each leaf a row padded with `padding`."""
    width = max(len(leaf.token_ids) for leaf in leaves)
    token_ids = torch.full((len(leaves), width), padding)
    trained = torch.zeros((len(leaves), width), dtype=torch.bool)
    for row, leaf in enumerate(leaves):
        token_ids[row, : len(leaf.token_ids)] = torch.tensor(leaf.token_ids)
        trained[row, : len(leaf.token_ids)] = torch.tensor(leaf.trained, dtype=torch.bool)
    # Padding is on the right and attention is causal: no mask is needed. Only trained tokens meet the vocabulary.
    hidden = model.model(input_ids=token_ids).last_hidden_state[:, :-1]
    is_target = trained[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[is_target]), token_ids[:, 1:][is_target])


Loss = Callable[..., torch.Tensor]
"""The mean over a batch's trained tokens, with the arguments of `flat_loss`."""


def make_model(tokenizer: PreTrainedTokenizerFast, *, settings: WarmStartSettings, seed: int) -> Qwen3ForCausalLM:
    """Returns a Qwen3 with random fp32 weights, a function of the seed."""
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
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def warm_start(
    tokenizer: PreTrainedTokenizerFast,
    *,
    memory: dict[str, int],
    calculator: OneArgumentTool,
    lookup: OneArgumentTool,
    settings: Settings,
) -> Qwen3ForCausalLM:
    """Makes the model and trains it, with a line of progress on stderr now and then.

    Args:
        tokenizer: the demo's tokenizer.
        memory: what the lookup memory holds; tasks are drawn from it.
        calculator: the real tool.
        lookup: the real tool.
        settings: with a warm start.

    Returns:
        The trained model, in evaluation mode.
    """
    warm = settings.warm_start
    assert warm is not None
    builder = create_continuous_token_builder(tokenizer, hf_model_type=Qwen3Config.model_type)
    schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in (calculator, lookup)]

    def render(solver: Solver, *, seed: int) -> Iterator[Leaf]:
        for task in make_tasks(warm.num_sessions, memory=memory, seed=seed):
            turns = solver.solve(task)
            *branches, main = trace_leaves(task, turns, builder=builder, tokenizer=tokenizer, tools=schemas)
            yield main
            yield from (branch for branch in branches if solver.rng.random() < warm.branch_fraction)

    def make_batch(step: int, habits: Habits) -> list[Leaf]:
        solver = Solver(calculator=calculator, lookup=lookup, habits=habits, rng=random.Random(step))
        return list(render(solver, seed=settings.warm_start_seed + 2 * warm.num_sessions * step))

    return teach(tokenizer, make_batch=make_batch, settings=warm, seed=settings.seed)


def teach(
    tokenizer: PreTrainedTokenizerFast,
    *,
    make_batch: Callable[[int, Habits], Sequence[Leaf]],
    settings: WarmStartSettings,
    seed: int,
    compute_loss: Loss = flat_loss,
) -> Qwen3ForCausalLM:
    """Makes a model and trains it in the two stages, with a line of progress on stderr now and then.

    Args:
        tokenizer: the model's.
        make_batch: the number of a step, from 0, and the solver's habits to the sequences of that step.
        settings: the model's size and the stages.
        seed: of the weights.
        compute_loss: what is minimised.

    Returns:
        The trained model, in evaluation mode.
    """
    model = make_model(tokenizer, settings=settings, seed=seed).train()
    optimizers = _make_optimizers(model, settings=settings)
    num_steps, start_s = settings.num_skilled_steps + settings.num_mixed_steps, time.perf_counter()
    for step in range(num_steps):
        is_skilled = step < settings.num_skilled_steps
        leaves = make_batch(step, settings.skilled if is_skilled else settings.mixed)
        if is_skilled:
            rate = _rate(step, num_steps=settings.num_skilled_steps)
        else:
            rate = settings.mixed_rate * _rate(step - settings.num_skilled_steps, num_steps=settings.num_mixed_steps)
        padding = tokenizer.pad_token_id
        loss = _train_step(model, optimizers, leaves, rate=rate, padding=padding, compute_loss=compute_loss)
        if (step + 1) % _STEPS_PER_LINE == 0 or step + 1 == num_steps:
            elapsed_s = time.perf_counter() - start_s
            print(
                f"    step {step + 1} of {num_steps}: loss {loss:.3f}, {elapsed_s:.0f} s", file=sys.stderr, flush=True
            )
    return model.eval()


def _rate(step: int, *, num_steps: int) -> float:
    """Share of the peak learning rate: a short rise, then a cosine from 1 to a twentieth."""
    return min(1.0, (step + 1) / _RISE_STEPS) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / num_steps)))


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
    model: Qwen3ForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    leaves: Sequence[Leaf],
    *,
    rate: float,
    padding: int,
    compute_loss: Loss = flat_loss,
) -> float:
    """One step; `rate` is the share of the peak learning rates. Returns the loss."""
    loss = compute_loss(model, leaves=leaves, padding=padding)
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate
        optimizer.step()
    return loss.item()
