"""What the estimators rely on in verl 0.9.1: the registry, what it calls them with, and how rows are laid out."""

import inspect

import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.utils.padding import response_to_nested


def test_the_registry_is_a_dict_of_names() -> None:
    registry = core_algos.ADV_ESTIMATOR_REGISTRY
    assert {"gae", "grpo"} <= set(registry) and all(type(name) is str for name in registry)
    assert "ADV_ESTIMATOR_REGISTRY[name] != fn" in inspect.getsource(core_algos.register_adv_est), (
        "registering the same function again does nothing"
    )


def test_rows_are_padded_behind_the_response() -> None:
    """Column t of an advantage is response token t; the padding is cut off when it is stored."""
    padded = torch.tensor([[1.0, 2, 0], [3, 4, 5]])
    mask = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [row.tolist() for row in response_to_nested(padded, mask).unbind()] == [[1, 2], [3, 4, 5]]


def test_rows_come_in_the_order_of_the_keys() -> None:
    source = inspect.getsource(PPOTrainer._compute_advantage)
    assert "tq.kv_batch_get(keys=batch.keys" in source
    assert "data.to_padded_tensor()" in source
    assert "batch_keys=batch.keys" in source


def test_the_options_that_are_read_are_given() -> None:
    source = inspect.getsource(PPOTrainer._compute_advantage)
    assert "config=self.config.algorithm" in source
    assert '"norm_adv_by_std_in_grpo"' in source


def test_gspo_forms_its_ratio_from_the_whole_mask_without_a_gradient() -> None:
    """`tree.shared_tokens` scales gradients of log-probs; a ratio that let them through would mix the leaves."""
    source = inspect.getsource(core_algos.compute_policy_loss_gspo)
    assert "torch.sum(negative_approx_kl * response_mask, dim=-1) / seq_lengths" in source
    assert "log_prob - log_prob.detach() + negative_approx_kl_seq.detach().unsqueeze(-1)" in source
