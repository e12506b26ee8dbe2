"""Distillation on trees: a teacher's and a student's pass, both on the forest, against flat rows in float64.

The flat side is transformers' own attention on one row after another, and verl's functions: for top-k the one that its
engine gives the logits of all rows, and its loss. verl casts to float32 in between; `Float64` answers with float64.
"""

from functools import partial
from typing import Any

import pytest
import torch
from float64_mode import Float64
from plain_engine import PlainEngine
from process_groups import group_of_one
from relay_cases import LossCase, Result, flat_rows, verl_rows, worst_error
from tensordict import TensorDict
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig, DistillationLossConfig

from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.engine.losses.session_weights import session_weighted_loss
from verl_tree.engine.losses.top_k import IDS, LOG_PROBS, READING, TeacherTopK, reading_of
from verl_tree.engine.losses.untrained_rows import loss_of_any_rows
from verl_tree.engine.rows.columns import jagged
from verl_tree.testing.synthetic import random_forest

TOLERANCE = 1e-10
K = 8


@pytest.fixture(autouse=True, scope="module")
def alone() -> Any:
    with group_of_one():
        yield


def settings_of(**options: Any) -> DistillationConfig:
    options = {"loss_mode": "forward_kl_topk", "use_task_rewards": False, "use_policy_gradient": False, **options}
    return DistillationConfig(distillation_loss=DistillationLossConfig(topk=K, **options))


def loss_of(settings: DistillationConfig, *, mode: str = "token-mean") -> Any:
    config = LossCase(mode=mode).function().keywords["config"]
    return partial(distillation_ppo_loss, config=config, distillation_config=settings)


class Flat:
    """Models, their flat logits, and the mini-batch of a forest."""

    def __init__(self, seed: int) -> None:
        self.forest = random_forest(seed, num_leaves=9, mean_len=3, root_probability=0.15, vocab_size=VOCAB_SIZE)
        self.student, self.teacher = tiny_model(seed=1), tiny_model(seed=2, num_hidden_layers=3)
        for model in (self.student, self.teacher):
            model.set_attn_implementation("sdpa")
        self.data = verl_rows(self.forest, flat_rows(self.student, self.forest), LossCase(), seed=seed)
        self.data.pop("rollout_is_weights")
        # What the engine finds out about the denominators.
        num_tokens = int(jagged(self.data["response_mask"])[0].sum())
        tu.assign_non_tensor(self.data, calculate_entropy=True, batch_num_tokens=num_tokens, dp_size=1)

    def logits(self, model: PreTrainedModel) -> Tensor:
        rows = jagged(self.data["input_ids"])
        model.set_attn_implementation("sdpa")
        parts = rows[0].tensor_split(rows[1][1:-1])
        return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts])

    def teacher_columns(self) -> dict[str, Tensor]:
        """Return verl's columns, as its servers make them."""
        with torch.no_grad():
            top = self.logits(self.teacher).log_softmax(-1).topk(K)
        offsets = jagged(self.data["input_ids"])[1]
        of_rows = partial(torch.nested.nested_tensor_from_jagged, offsets=offsets)
        return {LOG_PROBS: of_rows(top.values), IDS: of_rows(top.indices)}

    def result(self, settings: DistillationConfig, loss_function: Any) -> Result:
        columns, offsets = self.teacher_columns(), jagged(self.data["input_ids"])[1]
        logits = self.logits(self.student)
        made = compute_forward_kl_topk(
            logits[None], columns[LOG_PROBS], columns[IDS], config=settings, data_format="thd"
        )
        ids = jagged(self.data["input_ids"])[0].roll(-1)
        scores = {name: value[0] for name, value in made.items()}
        scores["log_probs"] = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        scores["entropy"] = -(logits.log_softmax(-1).exp() * logits.log_softmax(-1)).sum(-1)
        outputs = {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in scores.items()}
        loss, metrics = loss_function(model_output=outputs, data=self.data, dp_group=None)
        self.student.zero_grad()
        loss.backward()
        return Result(loss.item(), gradients(self.student), [metrics])


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def ask_teacher(flat: Flat, *, num_ids: int = VOCAB_SIZE, **tree: Any) -> dict[str, Tensor]:
    """Return the columns that a pass of the teacher over the forest makes."""
    flat.teacher.set_attn_implementation(ATTENTION_NAME)
    reading = TeacherTopK(K, num_ids)
    data = flat.data.copy()
    tu.assign_non_tensor(data, **{READING: reading})
    outputs = PlainEngine(flat.teacher, **tree).forward_backward_batch(data, None, forward_only=True)["model_output"]
    return reading.columns(TensorDict(outputs, batch_size=[len(data)]))


def train(flat: Flat, columns: dict[str, Tensor], loss_function: Any, **tree: Any) -> Result:
    data = flat.data.copy()
    data.update(columns)
    flat.student.zero_grad()
    flat.student.set_attn_implementation(ATTENTION_NAME)
    made = PlainEngine(flat.student, **tree).forward_backward_batch(data, loss_function)
    return Result(sum(made["loss"]), gradients(flat.student), [made["metrics"]])


@pytest.mark.parametrize("loss_mode", ["k1", pytest.param("k2", marks=pytest.mark.long), "k3"])
def test_estimators_of_both_passes_equal_flat_rows(loss_mode: str) -> None:
    """As a reward, as verl asks for it of k1, and as a loss."""
    with Float64():
        flat = Flat(37)
        loss_function = loss_of(settings_of(loss_mode=loss_mode, use_policy_gradient=loss_mode == "k1"))
        ids, offsets = jagged(flat.data["input_ids"])
        with torch.no_grad():
            log_probs = flat.logits(flat.teacher).log_softmax(-1).gather(1, ids.roll(-1)[:, None])
        flat.data[LOG_PROBS] = torch.nested.nested_tensor_from_jagged(log_probs, offsets)
        want = flat.result(settings_of(), loss_function)
        assert min(each.norm() for each in want.gradients.values()) > 0
        flat.teacher.set_attn_implementation(ATTENTION_NAME)
        engine = PlainEngine(flat.teacher, capacity=7)
        made = engine.forward_backward_batch(flat.data.copy(), None, forward_only=True)["model_output"]["log_probs"]
        columns = {LOG_PROBS: torch.nested.nested_tensor_from_jagged(jagged(made)[0][:, None], offsets)}
        for capacity in (7, 4096):
            assert worst_error(train(flat, columns, loss_function, capacity=capacity), want) < TOLERANCE


def trained_places(flat: Flat) -> Tensor:
    """Return the places whose next token a loss reads."""
    (mask, mask_offsets), (_, offsets) = jagged(flat.data["response_mask"]), jagged(flat.data["input_ids"])
    marked = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    for row in range(len(offsets) - 1):
        here = mask[mask_offsets[row] : mask_offsets[row + 1]].bool()
        marked[offsets[row + 1] - len(here) - 1 : offsets[row + 1] - 1] = here
    return marked


@pytest.mark.parametrize("tree", [{"capacity": 4096}, {"capacity": 7}, {"capacity": 26, "relay": "never"}], ids=str)
def test_both_passes_equal_flat_rows(tree: dict[str, Any]) -> None:
    """A whole forest, sections, and packs that hold a shared token twice; chunks of 3 positions, so several."""
    with Float64():
        flat = Flat(31)
        settings = settings_of(loss_max_clamp=0.6, log_prob_min_clamp=-4.5)
        want_columns, columns = flat.teacher_columns(), ask_teacher(flat, logits_chunk_size=3, **tree)
        read = trained_places(flat)
        assert torch.equal(jagged(columns[IDS])[0][read], jagged(want_columns[IDS])[0][read].int())
        error = (jagged(columns[LOG_PROBS])[0] - jagged(want_columns[LOG_PROBS])[0])[read].abs().max()
        assert error < TOLERANCE
        want = flat.result(settings, loss_of(settings))
        assert min(each.norm() for each in want.gradients.values()) > 0
        got = train(flat, columns, loss_of(settings), logits_chunk_size=3, **tree)
        assert worst_error(got, want) < TOLERANCE


@pytest.mark.parametrize("options", [{"use_task_rewards": True}, {"use_policy_gradient": True}], ids=str)
def test_beside_task_rewards_and_as_a_reward(options: dict[str, Any]) -> None:
    with Float64():
        flat = Flat(32)
        settings = settings_of(**options)
        loss_function = loss_of(settings, mode="seq-mean-token-mean")
        want = flat.result(settings, loss_function)
        assert worst_error(train(flat, ask_teacher(flat, capacity=7), loss_function, capacity=7), want) < TOLERANCE


def test_metrics_are_verls_own() -> None:
    """One loss on all rows, so every metric is that of the flat rows; verl's own casts to float32 stay."""
    flat = Flat(33)
    settings = settings_of()
    (want,) = flat.result(settings, loss_of(settings)).metrics
    (got,) = train(flat, ask_teacher(flat, capacity=4096), loss_of(settings), capacity=4096).metrics
    assert got.keys() == want.keys()
    assert {"distillation/overlap_ratio", "distillation/teacher_mass_min"} < got.keys()
    for name, value in want.items():
        number = value.aggregate() if hasattr(value, "aggregate") else value
        (mine,) = got[name] if isinstance(got[name], list) else [got[name].aggregate()]
        assert mine == pytest.approx(float(number), rel=1e-5), name


def test_another_teacher_is_noticed() -> None:
    """Guards the tests above."""
    with Float64():
        flat = Flat(31)
        columns = ask_teacher(flat, capacity=4096)
        want = flat.result(settings_of(), loss_of(settings_of()))
        values, offsets = jagged(columns[LOG_PROBS])
        columns[LOG_PROBS] = torch.nested.nested_tensor_from_jagged(1.01 * values, offsets)
        assert worst_error(train(flat, columns, loss_of(settings_of()), capacity=4096), want) > 1e-4


def test_a_row_that_does_not_train_the_next_token_gives_no_distribution() -> None:
    """Two rows share position 1 and go on differently; the first trains nothing there, and has zeros in the column."""
    with Float64():
        flat = Flat(34)
        columns = ask_teacher(flat, capacity=4096)
        read = trained_places(flat)[:, None]
        for name in (IDS, LOG_PROBS):
            values, offsets = jagged(columns[name])
            columns[name] = torch.nested.nested_tensor_from_jagged(torch.where(read, values, 0), offsets)
        want = flat.result(settings_of(), loss_of(settings_of()))
        for capacity in (7, 4096):
            got = train(flat, columns, loss_of(settings_of()), capacity=capacity)
            assert worst_error(got, want) < TOLERANCE


def test_ids_that_the_student_does_not_know_are_left_out() -> None:
    flat = Flat(35)
    with torch.no_grad():
        log_probs = flat.logits(flat.teacher).log_softmax(-1)
    columns = ask_teacher(flat, num_ids=20, capacity=4096)
    read = trained_places(flat)
    want = log_probs[:, :20].topk(K)
    assert torch.equal(jagged(columns[IDS])[0][read], want.indices[read].int())
    assert jagged(columns[LOG_PROBS])[0][read].numpy() == pytest.approx(want.values[read].numpy(), abs=1e-5)


def test_a_team_is_refused_before_it_computes() -> None:
    flat = Flat(36)
    engine = PlainEngine(flat.student, capacity=4096)
    engine.team = torch.distributed.group.WORLD
    data = flat.data.copy()
    data.update(flat.teacher_columns())
    with pytest.raises(ValueError, match=r"loss_mode=forward_kl_topk: with .*ulysses_sequence_parallel_size=1, each"):
        engine.forward_backward_batch(data, loss_of(settings_of()))
    assert engine.num_calls == 0


def test_more_ids_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match=r"topk=9: they share 8 ids; give fewer"):
        TeacherTopK(9, 8)


def test_rows_without_a_teacher_and_ids_without_a_student_are_refused() -> None:
    flat = Flat(36)
    loss_function = partial(session_weighted_loss, partial(loss_of_any_rows, loss_of(settings_of())))
    with pytest.raises(ValueError, match=r"rows lack teacher_ids.*distillation\.nnodes=0"):
        reading_of(flat.data.copy(), loss_function, num_ids=VOCAB_SIZE)
    data = flat.data.copy()
    data.update(flat.teacher_columns())
    largest = int(jagged(data[IDS])[0].max())
    with pytest.raises(ValueError, match=rf"has {largest}, and the student's vocabulary has {largest} ids"):
        reading_of(data.copy(), loss_function, num_ids=largest)
    reading = reading_of(data, loss_function, num_ids=largest + 1)
    assert reading is not None
    assert IDS not in data
    assert LOG_PROBS not in data
    assert reading_of(flat.data, None, num_ids=1) is None
