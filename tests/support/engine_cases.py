"""What is compared with verl's own engine: families of models, cases, and the ranks on which each runs.

`beside_verl.py` runs the cases, and `tests/e2e/test_engines.py` starts it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from tiny_models import IMAGES, VOCAB_SIZE
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.workers.config import (
    DistillationConfig,
    DistillationLossConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    McoreActorConfig,
)
from verl.workers.utils.losses import ppo_loss, value_loss

ONE, TWO, TEAM, TEAMS, FOUR = (1, 1), (2, 1), (2, 2), (4, 2), (4, 4)
"""Numbers of ranks, and how many of them compute each tree together; FOUR has more ranks than key-value heads."""

ROUNDED = "rounds_shards"
"""The mutant that a comparison in float32 cannot see."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One comparison. The defaults are a token-mean PPO loss with clipping and dual clip active.

    `runs` are the ranks on which CI runs it, `long` those that are left to `scripts/test.sh --long`.
    """

    name: str
    runs: tuple[tuple[int, int], ...] = (TWO,)
    long: tuple[tuple[int, int], ...] = ()
    family: str = "qwen3"
    actor: Settings = field(default_factory=dict)
    model: Settings = field(default_factory=dict)
    tree: Settings = field(default_factory=dict)
    engine: Settings = field(default_factory=dict)
    is_critic: bool = False
    tied: bool = False
    rows: str = "deep"
    capacity: int = 96
    temperature_per_row: bool = False
    top_k: int = 0  # Ids of a teacher for each token, from which the policy is distilled, too
    corrected: bool = False
    num_steps: int = 1
    lr: float = 0.5
    same_objective: bool = True
    is_known_loss: bool = True
    frozen_tower: bool = False
    planned: bool = False  # The worker takes the steps, from a plan of mini-batches
    spoilt: str = ""  # A mutant (`verl_tree.testing.mutants`, `EXCHANGES`) of the tree side, which must be seen
    sp: int = 1
    float64: bool = False  # Both sides compute in float64

    @property
    def key(self) -> str:
        """What results call it."""
        return f"{self.family} {self.name}"


def bypass_loss(loss_type: str, *, rollout_is: str | None = None) -> Settings:
    """Return a policy loss whose old log-probs are the rollout's; it rejects tokens with far ratios."""
    correction = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type=loss_type,
        rollout_is=rollout_is,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.2_5.0",
    )
    return {"loss_mode": "bypass_mode", "rollout_correction": correction}


def make_loss(case: Case) -> Any:
    """Make verl's own loss function with the case's settings."""
    if case.is_critic:
        config = FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **case.actor)
        return partial(value_loss, config=config)
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **case.actor)
    if case.top_k:
        loss = DistillationLossConfig(loss_mode="forward_kl_topk", topk=case.top_k, use_policy_gradient=False)
        if "use_distributed_optimizer" in case.engine:  # verl asks the strategy who has parts of the vocabulary
            config = McoreActorConfig(strategy="megatron", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **case.actor)
        distillation = DistillationConfig(distillation_loss=loss)
        return partial(distillation_ppo_loss, config=config, distillation_config=distillation)
    return partial(ppo_loss if case.is_known_loss else custom_loss, config=config)


def custom_loss(**arguments: Any) -> Any:
    """Compute verl's loss under a name that the engine does not know, so that it takes the joint form."""
    return ppo_loss(**arguments)


KL: Settings = {"use_kl_loss": True, "kl_loss_coef": 0.3}
KL_AND_ENTROPY = KL | {"entropy_coeff": 0.05}
SMALL_KL: Settings = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
ENTROPY: Settings = {"entropy_coeff": 0.05}
SEQ_MEAN: Settings = {"loss_agg_mode": "seq-mean-token-mean"}
GSPO: Settings = {"policy_loss": {"loss_mode": "gspo"}} | SEQ_MEAN
LORA: Settings = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
CHECKPOINTS: Settings = {"enable_gradient_checkpointing": True}
TILES: Settings = {"tiled_mlp": {"enabled": True, "num_shards": 3}} | CHECKPOINTS
RELAY: Settings = {"capacity": 7}
SESSIONS: Settings = {"session_weight": "session"}
OTHER: Settings = {"same_objective": False}

# What two ranks must agree on is in CI: every denominator, KL and entropy, LoRA, critics, ranks without work, each kind
# of relay. All losses with all aggregations, and what changes no sum over ranks, are in float64 in tests/unit.
QWEN3 = (
    Case("token_mean", (ONE, TWO, TEAM, TEAMS), (FOUR,)),
    Case("float64", (TEAM,), (TWO, TEAMS, FOUR), actor=KL_AND_ENTROPY, float64=True),
    Case("float64_relay", (TEAM,), (TEAMS, FOUR), actor=KL_AND_ENTROPY, float64=True, tree=RELAY),
    Case("float64_wrong_order", (TEAM,), (TEAMS, FOUR), actor=KL_AND_ENTROPY, float64=True, spoilt="swaps_shards"),
    Case("float64_wrong_digits", (TEAM,), (TEAMS, FOUR), actor=KL_AND_ENTROPY, float64=True, spoilt=ROUNDED),
    Case("token_sum", actor={"loss_agg_mode": "token-sum"}),
    Case("seq_mean_token_sum", actor={"loss_agg_mode": "seq-mean-token-sum"}),
    Case("seq_mean_token_mean", actor=SEQ_MEAN),
    Case(
        "seq_mean_token_sum_norm",
        (TWO,),
        (ONE,),
        actor={"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 16},
    ),
    Case("gspo", (TWO, TEAM), actor=GSPO),
    Case("kl_and_entropy", (TWO, TEAM), (ONE, TEAMS, FOUR), actor=KL_AND_ENTROPY),
    Case("gradient_checkpointing", (TWO,), (TEAM,), model=CHECKPOINTS),
    Case("tiled_mlp", model=TILES),
    Case("tied_embeddings", (TWO,), (TEAM,), tied=True),
    Case("lora", (TWO, TEAM), (ONE, TEAMS), model=LORA),
    Case("one_pack", (), (TWO,), capacity=4096),
    Case("capacity_by_memory", (TWO,), (ONE, TEAM), tree={"capacity": "auto", "memory_gib": 0.01}),
    Case("dense_backend", (), (TWO,), tree={"backend": "dense"}),
    Case("flat_packs", (TWO, TEAM), (ONE,), tree={"gate": "always"}, actor=ENTROPY),
    Case("loss_term_cap", tree={"max_loss_terms": 40, "relay": "never"}),
    Case("packing_heuristic", (), (TWO,), tree={"packing": "heuristic", "relay": "never"}, capacity=37),
    Case("packing_exact", (), (TWO,), tree={"packing": "exact", "relay": "never"}, capacity=41),
    Case("prompts_only", tree={"sharing": "prompt"}, rows="duplicates", capacity=24),
    Case("top_k", (TWO,), top_k=3, tree={"logits_chunk_size": 3}),
    Case("small_chunks", (), (TWO, TEAM), tree={"logits_chunk_size": 3}, actor=ENTROPY),
    Case("temperature_per_row", (TWO, TEAM), temperature_per_row=True, actor=ENTROPY),
    Case("shared_tokens_once", (TWO,), (ONE,), tree={"shared_tokens": "once"}, **OTHER),
    Case("shared_tokens_once_flat", (), (TWO,), tree={"shared_tokens": "once", "gate": "always"}, **OTHER),
    Case("gspo_mean", (), (TWO,), actor=GSPO, tree={"shared_tokens": "mean"}, **OTHER),
    Case("gspo_once", (), (TWO,), actor=GSPO, tree={"shared_tokens": "once"}, **OTHER),
    Case("critic", (ONE, TWO, TEAM), (TEAMS, FOUR), is_critic=True),
    # With named modules the value head has no adapter. It is trained whole in both cases.
    Case("critic_lora", (TWO,), (ONE,), is_critic=True, model=LORA | {"target_modules": ["q_proj", "v_proj"]}),
    Case("critic_seq_mean", (), (TWO,), is_critic=True, actor=SEQ_MEAN),
    Case("session_weight_token_mean", tree=SESSIONS, actor=KL_AND_ENTROPY),
    Case("session_weight_token_sum", (), (TWO,), tree=SESSIONS, actor={"loss_agg_mode": "token-sum"}),
    Case("session_weight_gspo", (), (TWO,), tree=SESSIONS, actor=GSPO),
    Case("session_weight_critic", tree=SESSIONS, is_critic=True, actor={"loss_agg_mode": "seq-mean-token-sum"}),
    Case("session_weight_relay", tree=SESSIONS | RELAY | {"max_loss_terms": 20}),
    Case("session_weight_idle_rank", tree=SESSIONS, rows="idle_rank", actor=KL),
    Case("session_weight_rollout_correction", (), (TWO,), tree=SESSIONS, rows="duplicates", corrected=True),
    Case("session_weight_shared_tokens_mean", (), (TWO,), tree=SESSIONS | {"shared_tokens": "mean"}, **OTHER),
    Case(
        "mini_batches_of_sessions",
        (ONE, TWO, TEAM),
        planned=True,
        num_steps=2,
        tree=SESSIONS,
        actor=SEQ_MEAN | KL,
    ),
    Case("duplicates_and_prefixes", (TWO,), (TEAM,), rows="duplicates"),
    # Duplicates with other old log-probs and weights; tokens and whole rows rejected once the denominators were set.
    Case("rollout_correction_token_mean", (TWO,), (ONE,), rows="duplicates", corrected=True),
    Case("rollout_correction_seq_mean", (), (TWO,), rows="duplicates", corrected=True, actor=SEQ_MEAN),
    Case("bypass_ppo_clip", (), (ONE, TWO), rows="duplicates", actor={"policy_loss": bypass_loss("ppo_clip")}),
    Case("bypass_reinforce", rows="duplicates", actor={"policy_loss": bypass_loss("reinforce", rollout_is="sequence")}),
    # Every other family of siblings has advantages of 0, or every row of a rank has.
    Case("live_rows", (), (ONE, TWO, TEAM), rows="dead"),
    Case("live_rows_relay", tree=RELAY | SESSIONS, rows="dead"),
    Case("live_rank", (TWO,), (TEAMS,), rows="dead_rank"),
    Case("one_token_responses", (TWO, TEAM), (ONE,), rows="one_token"),
    Case("single_row", (), (TWO,), rows="single"),
    Case("ten_steps", (TWO,), (ONE, TEAM), num_steps=10, lr=0.1, actor=SMALL_KL),
    # Trees in sections. tests/unit/relay has all losses and many capacities, in float64.
    Case("relay_every_token", (TWO,), (TEAM, TEAMS, FOUR), tree={"capacity": 2}, actor=ENTROPY),
    Case(
        "relay_checkpointing_on_host",
        (TEAM,),
        (ONE, TWO),
        tree=RELAY | {"relay_store": "host"},
        model=CHECKPOINTS,
        tied=True,
    ),
    Case("relay_critic", (), (TWO, TEAM), tree=RELAY, is_critic=True),
    Case("relay_lora", (), (TWO, TEAM), tree=RELAY, model=LORA),
    Case("relay_critic_lora", tree=RELAY, is_critic=True, model=LORA),
    Case("relay_tiled_mlp_offload_lora", tree=RELAY, model=LORA | TILES | {"enable_activation_offload": True}),
    Case(
        "relay_temperature_per_row",
        (TWO,),
        (TEAM,),
        tree=RELAY | {"max_loss_terms": 40},
        temperature_per_row=True,
        actor=ENTROPY,
    ),
    Case("relay_joint", (ONE, TWO, TEAM), tree=RELAY | {"max_loss_terms": 20}, is_known_loss=False),
    Case("relay_ten_steps", (), (TWO, TEAM), tree=RELAY, num_steps=10, lr=0.1, actor=SMALL_KL),
    Case("relay_rollout_correction", (), (TWO,), tree=RELAY, rows="duplicates", corrected=True),
    Case(
        "relay_bypass_reinforce",
        (),
        (TWO,),
        tree=RELAY,
        rows="duplicates",
        actor={"policy_loss": bypass_loss("reinforce", rollout_is="token")},
    ),
    Case("relay_idle_rank", (TWO, TEAMS), tree=RELAY, rows="idle_rank", actor=KL),
    Case("idle_rank", (TWO,), (TEAMS,), rows="idle_rank", actor=KL),
)

MIXTURES = {
    "qwen3 moe": (
        Case("token_mean", (ONE, TWO, TEAM), actor=KL_AND_ENTROPY),
        Case("lora", model=LORA),
        Case("checkpointing", (), (TWO,), model=CHECKPOINTS),
        Case("critic", is_critic=True),
        Case("relay", tree=RELAY),
        Case("idle_rank", rows="idle_rank"),
    ),
    "gpt-oss": (
        Case("token_mean", (ONE, TWO, TEAM)),
        Case("lora", (), (TWO,), model=LORA),
        Case("checkpointing", (), (TWO,), model=CHECKPOINTS),
        Case("critic", (), (TWO,), is_critic=True),
        Case("relay", tree=RELAY),
    ),
}

# Each family is in CI, and each kind of case with one of them; on one rank a family without and one with a tower.
_CHECKPOINTED = Case("token_mean", (TWO,), (ONE,), model=CHECKPOINTS)
_LORA_CHECKPOINTED = Case("token_mean", (TWO,), (ONE,), model=LORA | CHECKPOINTS)
_RELAY_LORA = Case("relay_lora", (), (TWO,), tree=RELAY, model=LORA)
RECURRENT = {
    "qwen3_next": (
        Case("token_mean", (ONE, TWO)),
        Case("kl_and_entropy", (), (TWO,), actor=KL_AND_ENTROPY),
        Case("lora", (), (TWO,), model=LORA),
        Case("critic", is_critic=True),
        Case("relay_lora", tree=RELAY, model=LORA),
    ),
    "qwen3_5_text": (
        Case("token_mean", (TWO,), (ONE,)),
        Case("gradient_checkpointing", (), (TWO,), model=CHECKPOINTS),
        Case("lora", model=LORA | CHECKPOINTS),
        Case("duplicates_and_prefixes", (), (TWO,), rows="duplicates"),
        Case("one_token_responses", (), (TWO,), rows="one_token"),
        Case("idle_rank", (), (TWO,), rows="idle_rank"),
        Case("three_steps", (), (TWO,), num_steps=3, lr=0.01),
        Case("relay_checkpointing_on_host", tree={"capacity": 20, "relay_store": "host"}, model=CHECKPOINTS),
        Case("relay_idle_rank", rows="idle_rank", tree=RELAY),
    ),
    "qwen3_5_moe_text": (_LORA_CHECKPOINTED,),
    "olmo_hybrid": (_CHECKPOINTED, _RELAY_LORA),
    "lfm2": (_CHECKPOINTED, _RELAY_LORA),
    "lfm2_moe": (_LORA_CHECKPOINTED,),
    "granitemoehybrid": (_CHECKPOINTED, _RELAY_LORA),
    # verl replaces the forwards of the classes of Qwen3.5 in the process that loads this one, so it is the last.
    "qwen3_5": (
        Case("token_mean", (ONE, TWO)),
        Case("gradient_checkpointing", (), (TWO,), model=CHECKPOINTS),
        Case("relay", tree={"capacity": 11}),
        # The tower's adapters would get no gradient and stay zero.
        Case("lora", (), (TWO,), model=LORA | {"target_modules": ["in_proj_qkv", "out_proj", "q_proj", "gate_proj"]}),
    ),
}

_IMAGES = (
    Case("one_pack", (ONE,), capacity=4096),
    Case("packs", capacity=45, tree={"relay": "never"}),
    Case("gradient_checkpointing", (), (TWO,), capacity=60, model=CHECKPOINTS),
    Case("lora", capacity=60, model=LORA),
    Case("relay", capacity=7),  # sections cut through images
    Case("gspo", (), (TWO,), capacity=60, actor=GSPO),
    Case("flat_packs", (), (TWO,), capacity=60, tree={"gate": "always"}),
    Case("joint", (), (TWO,), capacity=7, is_known_loss=False),
    Case("temperature_per_row", (), (TWO,), capacity=60, temperature_per_row=True),
    Case("frozen_tower", (ONE,), capacity=20, frozen_tower=True),
)


def _of_family(family: str, cases: tuple[Case, ...]) -> list[Case]:
    """Return the cases with what the family needs."""
    found = []
    for case in cases:
        case = replace(case, family=family)
        if family in RECURRENT:  # steps that are small enough for a recurrence, and trees that fit into packs
            case = replace(case, lr=min(case.lr, 0.05), capacity=160)
        elif family == "gpt-oss":  # transformers' SDPA has no sinks, so verl's own engine runs eager attention
            case = replace(case, model=case.model | {"override_config": {"attn_implementation": "eager"}})
        elif family in IMAGES:
            case = replace(case, actor=ENTROPY | case.actor)
        found.append(case)
    return found


BY_FAMILY = {"qwen3": QWEN3} | MIXTURES | RECURRENT | {name: _IMAGES for name in IMAGES if "moe" not in name}
BY_FAMILY["qwen3_vl_moe"] = (Case("relay", (), (TWO,), capacity=7),)
CASES = [case for family, cases in BY_FAMILY.items() for case in _of_family(family, cases)]

GRADIENTS = "halves_gradients"
"""The mutant that the canary must see; the comparison sees the others."""
CONTROLS = [
    Case(f"wrong {what}", (), spoilt=mutant, capacity=4096)
    for what, mutant in (("mask", "sees_all"), ("positions", "counts_along_the_pack"), ("gradients", GRADIENTS))
]

NUM_FORESTS = 8


def forest_rows(seed: int, *, rank: int) -> list[tuple[list[int], list[int]]]:
    """Draw the (prompt, response) rows of trees at least three nodes deep, many of which have one token.

    One row is there twice, and one is a strict prefix of another.
    """
    rng = np.random.default_rng([seed, rank])
    rows: list[tuple[list[int], list[int]]] = []

    def node() -> list[int]:
        return rng.integers(1, VOCAB_SIZE, size=rng.choice([1, 1, 2, 3, 6])).tolist()

    def grow(prompt: list[int], response: list[int], *, depth: int) -> None:
        if depth == 0:
            rows.append((prompt, response))
            return
        for _ in range(rng.integers(1, 4)):
            grow(prompt, response + node(), depth=depth - 1)

    for _ in range(rng.integers(1, 4)):
        grow(node(), node(), depth=int(rng.integers(2, 4)))
    prompt, response = rows[-1]
    return [*rows, rows[0], (prompt, response[:-1])]


def _forests(name: str, *, family: str, ranks: tuple[int, int], engine: Settings, team_size: int = 1) -> Iterator[Case]:
    """Yield updates on drawn forests on a layout of ranks: three relayed, one with ten steps.

    A team adds up capacities.
    """
    for seed in range(NUM_FORESTS):
        rows = forest_rows(seed, rank=0)
        num_tokens = len({(*prompt, *response[:end]) for prompt, response in rows for end in range(len(response) + 1)})
        capacity = {0: 2, 1: 7, 2: num_tokens // 3 // team_size}.get(seed, 4096)
        steps: Settings = {"num_steps": 10, "lr": 0.1, "actor": SMALL_KL} if seed == 3 else {"actor": KL_AND_ENTROPY}
        yield Case(
            f"forest {seed}, {name}",
            runs=(),
            long=(ranks,),
            family=family,
            rows=f"forest {seed}",
            capacity=capacity,
            engine=engine,
            **steps,
        )


EXPERTS: Settings = {"expert_parallel_size": 2, "moe_implementation": "fused_cpu"}
FOUR_ALONE = (4, 1)


_VL_MOE = (Case("relay", capacity=7), Case("experts in parallel", engine=EXPERTS, capacity=60))


def _qwen3_5() -> Iterator[Case]:
    """Yield cases of Qwen3.5 as VeOmni takes it, packed. Published models have a tower."""
    on_host: Settings = {"capacity": 20, "relay_store": "host"}
    packed: Settings = {"use_remove_padding": True}
    for case in (
        Case("relay_checkpointing_on_host", family="qwen3_5", tree=on_host, model=CHECKPOINTS),
        Case("experts in parallel", family="qwen3_5_moe", engine=EXPERTS),
        Case("relay", (), (TWO,), family="qwen3_5_moe", tree=RELAY),
        Case("frozen_tower", (), (TWO,), family="qwen3_5", frozen_tower=True),
        Case("text", (), (TWO,), family="qwen3_5_text"),
        Case("text", (), (TWO,), family="qwen3_5_moe_text"),
    ):
        yield replace(case, lr=0.05, capacity=160, model=packed | case.model)


def _veomni() -> Iterator[Case]:
    """Yield the cases beside verl's VeOmni engine: what it builds and exchanges by itself."""
    of_name = {case.key: replace(case, runs=(TWO,), long=()) for case in CASES}
    yield replace(of_name["qwen3 token_mean"], runs=(TWO, TEAM), long=(FOUR_ALONE, TEAMS))
    for name in (
        "kl_and_entropy",
        "gradient_checkpointing",
        "tiled_mlp",
        "critic",
        "relay_joint",
        "relay_idle_rank",
        "session_weight_token_mean",
    ):
        yield of_name[f"qwen3 {name}"]
    yield replace(of_name["qwen3 relay_every_token"], long=(TEAMS,))
    for name in ("relay_ten_steps", "live_rank", "capacity_by_memory"):
        yield replace(of_name[f"qwen3 {name}"], runs=(), long=(TWO,))
    for family in ("gemma3", "llama", "qwen2 window"):
        yield Case("token_mean", (), (TWO,), family=family)
    for name in ("token_mean", "relay"):
        yield of_name[f"gpt-oss {name}"]
        yield replace(of_name[f"qwen3 moe {name}"], runs=(), long=(TWO,))
    for name in ("token_mean", "relay", "idle_rank"):
        experts = replace(of_name[f"qwen3 moe {name}"], engine=EXPERTS, long=(FOUR_ALONE, TEAMS))
        yield replace(experts, name=f"{name}, experts in parallel")
    yield from _qwen3_5()
    for family in IMAGES:
        for case in _VL_MOE if family == "qwen3_vl_moe" else _IMAGES:
            is_short = (family, case.name) in (("qwen3_vl", "relay"), ("qwen3_vl_moe", "experts in parallel"))
            on_two = replace(case, runs=(TWO,) if is_short else (), long=() if is_short else (TWO,))
            yield from () if case.model == LORA else _of_family(family, (on_two,))
    for ranks in (TWO, TEAM):
        yield from _forests("alone", family="qwen3", ranks=ranks, engine={}, team_size=ranks[1])
    for ranks in (FOUR_ALONE, TEAMS):
        yield from _forests("experts in parallel", family="qwen3 moe", ranks=ranks, engine=EXPERTS, team_size=ranks[1])


ALONE: Settings = {"sequence_parallel": False, "use_distributed_optimizer": False}
TENSOR: Settings = ALONE | {"tensor_model_parallel_size": 2}
SEQUENCE: Settings = TENSOR | {"sequence_parallel": True}
STAGES: Settings = ALONE | {"pipeline_model_parallel_size": 2}
VIRTUAL: Settings = STAGES | {"virtual_pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[tuple[int, int], Settings]] = {
    "TP 1": (ONE, ALONE),
    "DP 2": (TWO, ALONE),
    "DP 2, distributed optimizer": (TWO, ALONE | {"use_distributed_optimizer": True}),
    "EP 2": (TWO, ALONE | {"expert_model_parallel_size": 2}),
    "TP 2": (TEAM, TENSOR),
    "TP 2, sequence parallel": (TEAM, SEQUENCE),
    "PP 2": (TEAM, STAGES),
    "PP 2, virtual stages": (TEAM, VIRTUAL),
    "TP 2, PP 2": (FOUR, SEQUENCE | STAGES | {"sequence_parallel": True}),
}
"""Ranks, and how many of them have the same rows; and what verl's config says of them."""

ON_MEGATRON = {
    "qwen3 kl_and_entropy": "DP 2, distributed optimizer; TP 2, sequence parallel; PP 2",
    "qwen3 critic": "TP 2, sequence parallel; PP 2, virtual stages",
    "qwen3 relay_every_token": "TP 2, sequence parallel; PP 2; PP 2, virtual stages",
    "qwen3 relay_joint": "PP 2, virtual stages",
    "qwen3 top_k": "TP 2, sequence parallel",
    "qwen3 relay_idle_rank": "DP 2",
    "qwen3 session_weight_token_mean": "DP 2",
    "qwen3 temperature_per_row": "PP 2",
    "qwen3 tied_embeddings": "PP 2",
    "qwen3 moe token_mean": "EP 2",
    "qwen3 moe relay": "EP 2",
    "qwen3 moe idle_rank": "EP 2",
}
LONG_ON_MEGATRON = {
    "qwen3 token_mean": "TP 1; TP 2",
    "qwen3 kl_and_entropy": "TP 1; TP 2; PP 2, virtual stages; TP 2, PP 2",
    "qwen3 relay_every_token": "TP 2, PP 2",
    "qwen3 relay_ten_steps": "PP 2",
    "qwen3 live_rows": "PP 2",
    "qwen3 live_rank": "DP 2",
    "qwen3 relay_joint": "TP 2; PP 2",
    "qwen3 critic": "PP 2",
    "qwen3 tied_embeddings": "TP 2",
    "qwen3 moe token_mean": "TP 1",
}
"""Each layout, each kind of relay, and what crosses ranks and stages."""


def _megatron() -> Iterator[Case]:
    """Yield the cases beside verl's Megatron engine."""
    of_name = {case.key: replace(case, runs=(), long=()) for case in CASES}
    for lane, cases in (("runs", ON_MEGATRON), ("long", LONG_ON_MEGATRON)):
        for key, layouts in cases.items():
            for layout in layouts.split("; "):
                ranks, engine = LAYOUTS[layout]
                case = of_name[key]
                lanes: Settings = {lane: (ranks,)}
                yield replace(case, name=f"{case.name}, {layout}", engine=engine, **lanes)
    for layout, (ranks, engine) in LAYOUTS.items():
        family = "qwen3 moe" if "EP" in layout else "qwen3"
        yield from _forests(layout, family=family, ranks=ranks, engine=engine)


def _with_controls(cases: Iterator[Case]) -> list[Case]:
    """Return the cases, and for each layout of ranks among them those that must fail, in CI if the layout is."""
    found = list(cases)
    layouts: dict[str, tuple[str, tuple[int, int], Case]] = {}
    for lane in ("runs", "long"):
        for case in found:
            for ranks in getattr(case, lane):
                layouts.setdefault(repr((ranks, case.engine)), (lane, ranks, case))
    for lane, ranks, case in layouts.values():
        layout = case.name.partition(", ")[2]
        for control in CONTROLS:
            if control.spoilt == GRADIENTS and case.family in MIXTURES:
                continue  # whose experts rounding may change, so the canary does not look
            name = f"{control.name}, {layout}" if layout else control.name
            lanes: Settings = {lane: (ranks,)}
            found.append(replace(control, name=name, family=case.family, engine=case.engine, **lanes))
    return found


CASES_OF = {
    "fsdp2": CASES,
    "veomni": _with_controls(_veomni()),
    # Once mbridge has seen a model with tied embeddings, it takes every later one of the process for such a model.
    "megatron": sorted(_with_controls(_megatron()), key=lambda case: case.tied),
}
"""By the engine of verl beside which they run."""
