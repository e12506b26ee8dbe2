"""An update that this machine cannot hold is warned of before Ray starts."""

from pathlib import Path

import psutil
import pytest
from input_cases import resolved, write_model

from verl_tree.launch.checks import find
from verl_tree.launch.checks.memory import GIB, check_update_memory, foreseen, model_size

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
TINY = {
    "hidden_size": 10,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 5,
    "vocab_size": 100,
}
NUM_PARAMETERS = 3 * (10 * (2 * 20 + 2 * 10) + 2 * 10 + 2 * 5 + 3 * 10 * 20) + 100 * 10 + 10
BATCH = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"]


@pytest.fixture
def given(tmp_path: Path):
    """Return how to resolve overrides with a model of some sizes."""

    def resolve(*overrides: str, **sizes: object):
        return resolved(f"{MODEL}.path={write_model(tmp_path, **TINY | sizes)}", *overrides)

    return resolve


def test_bytes_by_hand(given) -> None:
    """Float32 weights, gradients twice and two numbers of Adam; vLLM has its weights and 1 GiB of keys and values."""
    config = given("tree.capacity=7", "tree.logits_chunk_size=4")
    needs = foreseen(config, model_size(config))
    assert needs.num_tokens == 7
    assert needs.states == 4 * 5 * NUM_PARAMETERS
    for option in ("tree.canary=0", "tree.canary_gradient_every=0", "tree.enabled=false"):
        plain = given("tree.capacity=7", option)
        assert foreseen(plain, model_size(plain)).states == 4 * 4 * NUM_PARAMETERS
    assert needs.rollout == 4 * NUM_PARAMETERS + GIB
    # The last norm, three times its rows, three tensors of a chunk's logits, the gradient of the weight; checkpoints.
    head = 7 * (60 + 60) + 3 * 4 * 4 * 100 + 2 * 10 * 100
    layer = 7 * (396 + 60 + 20 + 20 + 6 * 2 * 20)
    assert needs.activations == 7 * (3 * 20 + 2 * 2 * 5) + max(head, layer)
    flat = given("tree.enabled=false", f"{ACTOR}.ppo_max_token_len_per_gpu=7", vocab_size=10_000)
    # The logits of all tokens and their gradients, in float32.
    assert foreseen(flat, model_size(flat)).activations == 7 * (3 * 20 + 2 * 2 * 5) + 2 * 4 * 7 * 10_000


def test_a_pass_has_no_more_tokens_than_the_rows_of_a_mini_batch(given) -> None:
    """4 prompts x 4 sessions of 1,024 tokens; on two ranks half of them each, in a team of two its share."""
    limit = f"{ACTOR}.ppo_max_token_len_per_gpu"
    two = ["trainer.n_gpus_per_node=2"]
    team = [*two, f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{MODEL}.use_remove_padding=true"]
    for overrides, expected in (
        ([f"{limit}=100000"], 16_384),
        ([f"{limit}=9000"], 9000),
        ([f"{limit}=100000", *two], 8192),
        ([f"{limit}=100000", *team], 8192),
        ([f"{limit}=5000", *team], 5000),
        (["tree.capacity=5000", *team], 2500),
    ):
        config = given(*BATCH, *overrides)
        assert foreseen(config, model_size(config)).num_tokens == expected


@pytest.mark.parametrize(
    ("overrides", "sizes", "parts"),
    [
        (["tree.capacity=4000"], {"vocab_size": 10**10}, ["tree.capacity=4000: an update", "take a smaller model"]),
        (
            ["tree.capacity=4000", f"{MODEL}.enable_gradient_checkpointing=false"],
            {
                "intermediate_size": 10**5,
                "num_hidden_layers": 1,
                "num_attention_heads": 10**7,
                "num_key_value_heads": 1,
            },
            [
                "a pass of 4000 tokens",
                "lower it or tree.logits_chunk_size, and set",
                "enable_gradient_checkpointing=true",
            ],
        ),
        (
            ["tree.enabled=false", f"{ACTOR}.ppo_max_token_len_per_gpu=16384"],
            {"vocab_size": 10**8, "hidden_size": 1},
            [f"{ACTOR}.ppo_max_token_len_per_gpu=16384: an update takes at least", "; lower it"],
        ),
    ],
)
def test_an_update_that_does_not_fit_is_warned_of(
    overrides: list[str], sizes: dict[str, int], parts: list[str], given
) -> None:
    (finding,) = check_update_memory(given(*BATCH, *overrides, **sizes))
    assert finding.is_warning
    for part in (*parts, f"this machine has {psutil.virtual_memory().total / GIB:.3g}"):
        assert part in finding.message


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["tree.capacity=4000"], {}),
        (["tree.capacity=auto", "tree.memory_gib=1"], {"vocab_size": 10**10}),
        (["trainer.nnodes=2"], {"vocab_size": 10**10}),
        ([], {"vocab_size": 10**10, "num_experts": 8}),
        ([], {"vocab_size": 10**10, "layer_types": ["linear_attention", "full_attention"]}),
        ([], {"vocab_size": 10**10, "hidden_size": None}),
        (["tree.capacity=4000", "tree.logits_chunk_size=1"], {"vocab_size": 10**6}),
    ],
    ids=str,
)
def test_what_fits_or_cannot_be_foreseen_is_not_warned_of(
    overrides: list[str], sizes: dict[str, object], given
) -> None:
    assert not list(check_update_memory(given(*overrides, **sizes)))


def test_the_warning_is_among_the_findings(given) -> None:
    found = [each.message for each in find(given("tree.capacity=4000", vocab_size=10**10))]
    assert len([message for message in found if "an update takes at least" in message]) == 1
