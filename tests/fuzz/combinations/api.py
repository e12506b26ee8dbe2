"""`tree_log_probs`, `score` and `score_batch` with drawn features, beside transformers on one path after another.

All is float64. The other side is the plain model: no checkpoints, tiles or sections. Where activations are dropped
there is no other side: the gradient is compared with the slope of what was returned, with the same random numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from float64_mode import Float64
from hybrid_cases import chain_of_one_token_nodes
from tiny_models import VOCAB_SIZE
from torch import Tensor
from tree_cases import flat_scores

from verl_tree.functional import score, score_batch, tree_log_probs
from verl_tree.functional.offload import offload_checkpoints
from verl_tree.functional.tiles import tile_modules
from verl_tree.testing.synthetic import random_forest
from verl_tree.tree import TokenForest

from .api_models import make_model
from .drawing import Settings
from .outcome import Comparison, Outcome, judged, refused

TOLERANCE, SLOPE_TOLERANCE = 1e-10, 1e-5
STEP = 1e-6

Rows = list[list[int]]
Gradients = dict[str, Tensor]


def run(settings: Settings, *, seed: int, words: Sequence[str]) -> Outcome:
    """Compare one draw; `words` are those of the refusal that is due, if any."""
    expected: tuple[type[Exception], ...] = (ValueError,)
    if settings["change"]:
        expected = (ValueError, RuntimeError)  # autograd's own refusal, which transformers alone gets as well
    with Float64():
        try:
            outcome = _compare(settings, np.random.default_rng([seed, 1]))
        except expected as error:
            return refused(ValueError(str(error)), words)
    return judged(outcome, words)


def _compare(settings: Settings, rng: np.random.Generator) -> Outcome:
    rows = make_rows(settings["rows"], rng)
    if settings["empty"]:
        rows.insert(int(rng.integers(len(rows) + 1)), [])
        _tree(make_model(settings), rows, settings)
        return Outcome("wrong", "an empty sequence was not refused")
    if settings["call"] != "log_probs":
        return _compare_continuations(settings, rows, rng)
    return _compare_slope(settings, rows, rng) if settings["dropout"] else _compare_log_probs(settings, rows, rng)


def make_rows(kind: str, rng: np.random.Generator) -> Rows:
    """Draw rows that share prefixes."""
    if kind == "chain":
        return chain_of_one_token_nodes(int(rng.integers(5, 16)))
    if kind == "long":  # a node is longer than a chunk of a recurrence
        prompt = rng.integers(1, VOCAB_SIZE, 70).tolist()
        return [prompt + rng.integers(1, VOCAB_SIZE, n).tolist() for n in (3, 1, 6)] + [[*prompt[:40], 5, 6]]
    options: dict[str, Any] = {
        "random": {"num_leaves": int(rng.integers(3, 10)), "mean_len": int(rng.integers(1, 6))},
        "duplicates": {"num_leaves": 7, "duplicate_probability": 0.35, "prefix_probability": 0.35},
        "single": {"num_leaves": 1, "mean_len": 4},
        "roots": {"num_leaves": 6, "root_probability": 0.6, "mean_len": 2},
    }[kind]
    rows = random_forest(int(rng.integers(2**31)), vocab_size=VOCAB_SIZE, **options)
    return [[int(token) for token in row] for row in rows] + ([] if kind == "single" else [[int(rows[0][0])]])


def prepared(settings: Settings) -> Any:
    """Make the model of the tree's side, which saves memory."""
    model = make_model(settings)
    base = model.get_base_model() if settings["lora"] else model
    if settings["tiles"]:
        tile_modules(base, num_tiles=settings["tiles"])
    if settings["checkpointing"]:
        base.gradient_checkpointing_enable({"use_reentrant": settings["checkpointing"] == "reentrant"})
    if settings["offload"]:
        offload_checkpoints(base)
    return model


def _tree(model: Any, rows: Rows, settings: Settings, temperature: Any = 1.0) -> Any:
    given: Callable[[list[int]], Any] = {
        "list": list,
        "int32": lambda row: np.asarray(row, dtype=np.int32),
        "tensor": torch.tensor,
    }[settings["ids"]]
    capacity = settings["capacity"]
    if settings["packing"]:
        capacity = max(capacity, *map(len, rows))
    return tree_log_probs(
        model,
        [given(row) for row in rows],
        temperature=temperature,
        calculate_entropy=settings["entropy"],
        backend=settings["backend"],
        capacity=capacity,
        packing=settings["packing"],
    )


def has_sections(settings: Settings, rows: Rows) -> bool:
    is_over = settings["capacity"] is not None and TokenForest.from_sequences(rows).num_tokens > settings["capacity"]
    return is_over and not settings["packing"]


def temperature_of(settings: Settings) -> Any:
    value = settings["temperature"]
    return torch.tensor(0.9, dtype=torch.float64, requires_grad=True) if value == "tensor" else value


def make_loss(kind: str, log_probs: Sequence[Tensor], entropy: Sequence[Tensor] | None) -> Tensor:
    """Return a loss with a weight of either sign for every (row, token)."""
    generator = torch.Generator().manual_seed(2)

    def weight(row: Tensor) -> Tensor:
        drawn = torch.randn(len(row), generator=generator, dtype=torch.float64)
        return drawn * (torch.rand(len(row), generator=generator) < 0.4) if kind == "sparse" else drawn

    total = sum(((weight(row) * row).sum() for row in log_probs), torch.zeros((), dtype=torch.float64))
    if entropy is not None:
        total = total + sum((weight(row) * row).sum() for row in entropy)
    if kind == "coupled":
        total = torch.tanh(total / 50.0) + torch.cat([*log_probs]).logsumexp(0) ** 2
    return total


def gradients(model: Any, loss: Tensor, temperature: Any, via: str) -> Gradients:
    """Return the gradients of the trained parameters that have one, and of the temperature."""
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if isinstance(temperature, Tensor):
        named["temperature"] = temperature
    if via == "grad":
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {name: each for name, each in zip(named, found, strict=True) if each is not None}
    times = 2 if via == "twice" else 1
    for number in range(times):
        loss.backward(retain_graph=number < times - 1)
    return {name: each.grad / times for name, each in named.items() if each.grad is not None}


def _flat(model: Any, rows: Rows, temperature: Any) -> tuple[list[Tensor], list[Tensor]]:
    base = model.get_base_model() if "get_base_model" in dir(model) else model
    base.set_attn_implementation("eager")
    scored = [flat_scores(model, row, temperature=temperature) for row in rows]
    return [each[0] for each in scored], [each[1] for each in scored]


def _compare_log_probs(settings: Settings, rows: Rows, rng: np.random.Generator) -> Outcome:
    compared = Comparison({})
    flat_model, here, there = make_model(settings), temperature_of(settings), temperature_of(settings)
    with torch.set_grad_enabled(settings["via"] != "none"):
        log_probs, entropy = _flat(flat_model, rows, there)
        model = prepared(settings)
        out = _tree(model, rows, settings, here)
    compared.scores("log-probs", out.log_probs, log_probs)
    if settings["entropy"]:
        compared.scores("entropy", out.entropy, entropy)
    if settings["via"] != "none":
        wanted = make_loss(settings["loss"], log_probs, entropy if settings["entropy"] else None)
        want = gradients(flat_model, wanted, there, "backward")
        loss = make_loss(settings["loss"], out.log_probs, out.entropy)
        if settings["change"]:
            change(model, settings["change"], rng)
        compared.gradients(gradients(model, loss, here, settings["via"]), want)
    return compared.outcome(TOLERANCE, has_sections=has_sections(settings, rows))


def change(model: Any, what: str, rng: np.random.Generator) -> None:
    """Change a third of the trained or of the frozen matrices between the forward and the backward pass."""
    names = [n for n, p in model.named_parameters() if p.requires_grad == (what == "trained") and p.dim() > 1]
    chosen = set(rng.choice(names, size=-(-len(names) // 3), replace=False).tolist())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in chosen:
                parameter.mul_(1.5)


def _compare_slope(settings: Settings, rows: Rows, rng: np.random.Generator) -> Outcome:
    """Compare the gradient along a direction with the slope of the loss along it."""
    model, temperature = prepared(settings), temperature_of(settings)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    along = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in named.items()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None and f"{name}.weight" in along:
            along[f"{name}.weight"][module.padding_idx] = 0.0  # torch gives this row no gradient

    def loss_at(step: float) -> Tensor:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.add_(along[name], alpha=step)
        torch.manual_seed(3)
        out = _tree(model, rows, settings, temperature)
        return make_loss(settings["loss"], out.log_probs, out.entropy)

    found = gradients(model, loss_at(0.0), temperature, settings["via"])
    found.pop("temperature", None)
    got = sum((gradient * along[name]).sum().item() for name, gradient in found.items())
    with torch.no_grad():
        slope = ((loss_at(STEP) - loss_at(-2 * STEP)) / (2 * STEP)).item()
    whole = sum(gradient.norm().item() ** 2 for gradient in found.values()) ** 0.5
    compared = Comparison({"slope": abs(got - slope) / max(abs(slope), whole)}, 1, int(whole == 0.0))
    return compared.outcome(SLOPE_TOLERANCE, has_sections=has_sections(settings, rows))


def _compare_continuations(settings: Settings, rows: Rows, rng: np.random.Generator) -> Outcome:
    """Compare the scores of continuations of one context or of several."""
    contexts = []
    for row in rows[: 1 if settings["call"] == "score" else 4]:
        context = row[: int(rng.integers(1, len(row) + 1))]
        parts = [rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 7))).tolist() for _ in range(rng.integers(0, 6))]
        contexts.append((context, parts + [part[:1] for part in parts[:2]]))
    labels = rng.integers(0, VOCAB_SIZE, 5).tolist() if settings["read"] == "labels" else None
    last = 2 if settings["read"] == "last" else None
    temperature = 0.9 if settings["temperature"] == "tensor" else settings["temperature"]
    model = prepared(settings)
    options = {"last": last, "labels": labels, "temperature": temperature}
    options |= {name: settings[name] for name in ("backend", "capacity")}
    made = score_batch(model, contexts, **options) if len(contexts) > 1 else [score(model, *contexts[0], **options)]
    compared, got, want, sequences = Comparison({}), [], [], []
    flat_model = make_model(settings)
    (flat_model.get_base_model() if settings["lora"] else flat_model).set_attn_implementation("eager")
    for (context, parts), scores in zip(contexts, made, strict=True):
        got += [*scores.log_probs]
        for part in parts:
            ids = torch.tensor([context + part])
            with torch.no_grad():
                by_place = (flat_model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
            chosen = by_place[:-1].gather(1, ids[0, 1:, None])[:, 0][-len(part) :]
            want.append(by_place[-1, labels] if labels else chosen[-last:] if last else chosen)
            sequences.append(context + part)
        if parts:
            compared.scores("sums", [scores.sums], [torch.stack([each.sum() for each in want[-len(parts) :]])])
            compared.scores("means", [scores.means], [torch.stack([each.mean() for each in want[-len(parts) :]])])
    compared.scores("scores", got, want)
    return compared.outcome(
        TOLERANCE, has_sections=bool(sequences) and has_sections(settings | {"packing": None}, sequences)
    )
