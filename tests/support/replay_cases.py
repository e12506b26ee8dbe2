"""Router replay on the tree engine beside an oracle: each row by itself, with experts set by hand in each router.

`tests/e2e/test_engines.py` starts it with two ranks, which compute each tree together where a model can be shared out;
rank 0 writes the errors.

Legend: N layers, k experts of a token.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import other_engines
import torch
import torch.distributed as dist
from process_groups import join_ranks
from tensordict import TensorDict
from tiny_models import RECURRENT, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreOptimizerConfig

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform and the engines)
from verl_tree.config import TREE_STRATEGY
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.worker import TreeTrainingWorker

# Three branches of one prompt, a strict prefix of the first, and another tree.
PROMPTS = [[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [9, 10]]
RESPONSES = [[8, 9, 10, 11], [8, 9, 12], [8, 14, 15, 16, 17], [8, 9], [20, 21, 22]]
NUM_LAYERS, NUM_EXPERTS = 3, 8
ON_MEGATRON = {"vocab_size": 64, "num_hidden_layers": 4, "mlp_only_layers": []}
"""What its bridge and its stages take: experts in all layers."""
SGD_RATE = 100.0
"""So that a step is larger than the rounding of the weights."""
NUM_TOKENS = [len(prompt) + len(response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def batch(routes: Sequence[Tensor] | None = None, *, max_token_len: int = 64) -> TensorDict:
    """Return the rows for a worker, with routes (tokens, N, k) of each row if given."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        {
            "prompts": torch.tensor(prompt),
            "responses": torch.tensor(response),
            "response_mask": torch.ones(len(response), dtype=torch.int64),
            "advantages": torch.randn(len(response), generator=generator),
        }
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    data = batch_of_rows(rows, max_token_len=max_token_len, global_batch_size=len(rows))
    if routes is not None:
        data["routed_experts"] = torch.nested.as_nested_tensor(list(routes), layout=torch.jagged)
    return data


def drawn_routes(*, seed: int, num_layers: int = NUM_LAYERS) -> list[Tensor]:
    """Draw two experts for each token and layer, the same ones for a token that rows share; none for layer 0."""
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        tokens = prompt + response
        routes = torch.zeros(len(tokens), num_layers, 2, dtype=torch.int16)
        for end in range(len(tokens)):
            generator = np.random.default_rng([seed, *tokens[: end + 1]])
            for layer in range(1, num_layers):
                routes[end, layer] = torch.from_numpy(generator.choice(NUM_EXPERTS, size=2, replace=False))
        rows.append(routes)
    return rows


def weighted_log_probs(*, model_output: dict[str, Tensor], data: TensorDict, dp_group: object) -> tuple[Tensor, dict]:
    """Sum the log-probs of responses times their advantages: a loss of verl's kind."""
    del dp_group
    total = torch.zeros(())
    for scores, response, advantages in zip(
        model_output["log_probs"].unbind(), data["responses"].unbind(), data["advantages"].unbind(), strict=True
    ):
        # A score stands one position before its token.
        total = total + (scores[len(scores) - len(response) - 1 : -1] * advantages).sum()
    return total, {}


@contextmanager
def routed(model: nn.Module, routes_LNk: Tensor, chosen: dict[int, Tensor]) -> Iterator[None]:
    """Set the experts of Qwen3-MoE's routers for one row, where they are not all 0, and keep the experts of all."""

    def hook_of(layer: int) -> Any:
        def hook(router: Any, inputs: tuple[Tensor], _output: object) -> tuple[Tensor, Tensor, Tensor]:
            logits = inputs[0].reshape(-1, router.hidden_dim) @ router.weight.T
            probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
            experts = probabilities.argsort(dim=-1, descending=True)[:, : router.top_k]
            given = routes_LNk[:, layer].long()
            experts = torch.where((given != 0).any(-1, keepdim=True), given, experts)
            chosen[layer] = experts
            scores = torch.stack([row[index] for row, index in zip(probabilities, experts, strict=True)])
            return logits, scores / scores.sum(-1, keepdim=True), experts

        return hook

    handles = [
        block.mlp.gate.register_forward_hook(hook_of(layer))
        for layer, block in enumerate(model.model.layers)
        if hasattr(block.mlp, "gate")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def oracle(folder: str, routes: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Return log-probs of each row, the experts that its tokens took (tokens, N, k), and the loss's gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    data, log_probs, taken, loss = batch(), [], [], torch.zeros(())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        chosen: dict[int, Tensor] = {}
        tokens = torch.tensor([prompt + response])
        with routed(model, routes[row], chosen):
            scores = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        mine = scores.gather(-1, tokens[0, 1:, None]).squeeze(-1)[-len(response) :]
        loss = loss + (mine * data["advantages"][row]).sum()
        log_probs.append(mine.detach())
        none = tokens.new_zeros(tokens.shape[1], 2)
        taken.append(torch.stack([chosen.get(layer, none) for layer in range(routes[row].shape[1])], 1))
    loss.backward()
    return log_probs, taken, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def save_mixtures(folder: Path, *, family: str = "qwen3 moe", **settings: Any) -> tuple[str, str]:
    """Save two random mixtures of one shape and return their folders.

    Unless the settings say otherwise, they have three layers; of Qwen3-MoE the first has no experts.
    """
    of_all = {"num_hidden_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS}
    for seed, name in enumerate(("before", "after")):
        model = tiny_model(family, size="engine", seed=seed, **(of_all | settings))
        # VeOmni finds the experts of Qwen3.5 under the names of transformers only.
        model.save_pretrained(folder / name, save_original_format=family == "qwen3 moe")
    return str(folder / "before"), str(folder / "after")


def gradients_of(
    worker: TreeTrainingWorker, data: TensorDict, *, loss: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """Return the gradients of an update, whole, without the step; the loss is `weighted_log_probs` if none is given."""
    engine = worker.engine
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss or weighted_log_probs, forward_only=False)
        return {
            name: (p.grad.full_tensor() if isinstance(p.grad, torch.distributed.tensor.DTensor) else p.grad).clone()
            for name, p in engine.module.named_parameters()
            if p.grad is not None
        }


def gradients_by_a_step(worker: TreeTrainingWorker, data: TensorDict) -> dict[str, Tensor]:
    """Return the gradients of an update, by the names of transformers: what a step of SGD takes off the weights."""
    engine = worker.engine
    before = {name: weight.clone() for name, weight in engine.bridge.export_weights(engine.module)}
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, weighted_log_probs, forward_only=False)
        engine.optimizer_step()
    after = dict(engine.bridge.export_weights(engine.module))
    return with_experts_together({name: (weight - after[name]) / SGD_RATE for name, weight in before.items()})


def with_experts_together(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients by the names of transformers, which has the weights of all experts of a layer in one."""
    found = {name: gradient for name, gradient in gradients.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in gradients.keys() - found.keys()}:
        gate, up, down = (
            torch.stack([gradients[f"{layer}.experts.{number}.{part}_proj.weight"] for number in range(NUM_EXPERTS)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.experts.down_proj": down}
    return found


def recorded(worker: TreeTrainingWorker, data: TensorDict) -> Any:
    """Run the pass of the old log-probs."""
    tu.assign_non_tensor(data, compute_loss=False)
    return worker.infer_batch(data)


def worst_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest relative error of the gradients."""
    return max(((found[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted)


def main() -> None:
    """Record routes, and impose others, on all ranks as one team."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default=TREE_STRATEGY)
    parser.add_argument("--family", default="qwen3 moe")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="fields of verl's config of it")
    arguments = parser.parse_args()
    out, strategy = arguments.out, arguments.strategy
    root = join_ranks()
    if strategy != TREE_STRATEGY:
        other_engines.load(strategy.removesuffix("_tree"))
    settings: dict[str, Any] = ON_MEGATRON if strategy == "megatron_tree" else {}
    if dist.get_rank() == 0:
        save_mixtures(root, family=arguments.family, **settings)
    dist.barrier()
    folder, num_layers = str(root / "before"), settings.get("num_hidden_layers", NUM_LAYERS)
    routes, others = (drawn_routes(seed=seed, num_layers=num_layers) for seed in (4, 5))
    # Small enough on Megatron that several calls are on their way through its stages at a time.
    gradients, max_token_len = (gradients_by_a_step, 7) if settings else (gradients_of, 64)
    sgd = {"optimizer": "sgd", "override_optimizer_config": {"sgd_momentum": 0.0}, "weight_decay": 0.0}
    optimizer = McoreOptimizerConfig(lr=SGD_RATE, clip_grad=1e9, total_training_steps=10, **sgd) if settings else None
    workers = [
        local_worker(
            folder,
            strategy=strategy,
            max_token_len=max_token_len,
            # Recurrent layers have no teams. Two ranks with the same rows have the mean of equal gradients.
            sequence_parallel_size=1 if arguments.family in RECURRENT else dist.get_world_size(),
            router_replay=mode,
            tree_options={"route_conflicts": conflicts},
            engine_options=arguments.engine_options,
            optimizer=optimizer,
        )
        for mode, conflicts in (("R2", "first"), ("R3", "first"), ("R3", "fork"))
    ]
    # A pipeline's last stage has them, elsewhere the first rank.
    told: list[Any] = [None] * dist.get_world_size()
    scores = recorded(workers[0], batch(max_token_len=max_token_len))
    dist.all_gather_object(told, None if scores is None else scores.get("routed_experts", None))
    routes_taken = next(each for each in told if each is not None)
    found = gradients(workers[1], batch(routes, max_token_len=max_token_len))
    differing = [routes[0], others[1], *routes[2:]]
    of_forks = gradients(workers[2], batch(differing, max_token_len=max_token_len))
    if dist.get_rank() == 0:
        _, taken, _ = oracle(folder, [torch.zeros_like(each) for each in routes])
        _, _, wanted = oracle(folder, routes)
        _, _, wanted_of_forks = oracle(folder, differing)
        pairs = zip(routes_taken.unbind(), taken, strict=True)
        num_others = sum(int((here.sort(-1).values != there.sort(-1).values).sum()) for here, there in pairs)
        errors = {"gradient": worst_error(found, wanted), "gradient of forks": worst_error(of_forks, wanted_of_forks)}
        out.write_text(json.dumps({"other experts": num_others, **errors}))


if __name__ == "__main__":
    main()
