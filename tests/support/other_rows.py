"""Rows in TransferQueue that our agent loop workers did not write: uni-agent's and those of verl's own workers.

Two prompts with two sessions each; tokens and rewards are drawn in `SESSIONS`.
"""

import asyncio
import types
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from transformers import BatchFeature, Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.model import compute_position_id_with_mask


@dataclass(frozen=True)
class Trajectory:
    """One trajectory; a response token above 40 is a tool's."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    reward: float
    is_finished: bool = True

    @property
    def mask(self) -> list[int]:
        """1 where a token was sampled."""
        return [int(token <= 40) for token in self.response]

    @property
    def log_probs(self) -> list[float]:
        """A log-prob per token, 0 where none was sampled."""
        return [-0.1 * (position + 1) * bit for position, bit in enumerate(self.mask)]


A, B = (5, 6, 7), (8, 9)
SESSIONS = {
    # a0: 5 6 7 ─┬─ 1 2 50 3        r = 1        a1: 5 6 7 ─── 1 2 50 ─┬─ 4 5     not finished, r = 0
    #            └─ 1 2 51 9 9      r = 1                             └─ 4
    ("000000000-a", 0): (Trajectory(A, (1, 2, 50, 3), 1.0), Trajectory(A, (1, 2, 51, 9, 9), 1.0)),
    ("000000000-a", 1): (
        Trajectory(A, (1, 2, 50, 4, 5), 0.0, is_finished=False),
        Trajectory(A, (1, 2, 50, 4), 0.0, is_finished=False),
    ),
    # b0: 8 9 ─┬─ 11 12             r = 0.25     b1: 8 9 ─── 11 13     r = 1
    #          └─ 11 12 52 14       r = 0.75
    ("000000001-b", 0): (Trajectory(B, (11, 12), 0.25), Trajectory(B, (11, 12, 52, 14), 0.75)),
    ("000000001-b", 1): (Trajectory(B, (11, 13), 1.0),),
}
KEYS = [f"{uid}_{session}_{leaf}" for (uid, session), leaves in SESSIONS.items() for leaf in range(len(leaves))]
UIDS = list(dict.fromkeys(uid for uid, _ in SESSIONS))


def write_uni_agent_rows() -> None:
    """Write the sessions as `OpenAICompatibleAgentFramework._write_session_trajectories_to_tq` does.

    The episode that did not finish is masked (`mask_unfinished_episode`). There is no `extra_fields`: what a trajectory
    has beyond verl's fields is a field of its own.
    Source: uni-agent of 2026-08-07, uni_agent/framework/framework.py.
    """
    _mark_prompts({"is_prompt": True, "status": "pending", "global_steps": 1})
    for (uid, session), trajectories in SESSIONS.items():
        written = [_uni_agent_row(trajectory, uid=uid, session=session) for trajectory in trajectories]
        fields, tags = [field for field, _ in written], [tag for _, tag in written]
        columns = tu.list_of_dict_to_tensordict(fields)
        for name, value in fields[0].items():
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                columns[name] = tu.nested_tensor_from_tensor_list([field[name] for field in fields])
        keys = [f"{uid}_{session}_{index}" for index in range(len(fields))]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=columns, tags=tags)
    _mark_prompts({"status": "finished"})


def _uni_agent_row(trajectory: Trajectory, *, uid: str, session: int) -> tuple[dict[str, Any], dict[str, Any]]:
    prompts, responses = torch.tensor(trajectory.prompt), torch.tensor(trajectory.response)
    input_ids = torch.cat([prompts, responses])
    attention_mask = torch.ones_like(input_ids)
    mask = torch.tensor(trajectory.mask) * int(trajectory.is_finished)
    scores = torch.zeros(len(responses))
    scores[-1] = trajectory.reward
    field = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask.unsqueeze(0)).squeeze(0),
        "multi_modal_inputs": {},
        "rollout_log_probs": torch.tensor(trajectory.log_probs),
        "rm_scores": scores,
        "min_global_steps": 0,
        "max_global_steps": 0,
        "reward_extra_info": {"acc": trajectory.reward},
        "response_mask": mask,
        "loss_mask": mask,
        "uid": uid,
        "raw_prompt": [{"role": "user", "content": "q"}],
        "data_source": "uni",
        "session_id": session,
        "global_steps": 1,
        "num_turns": torch.tensor(2),
    }
    tag = {
        "global_steps": 1,
        "min_global_steps": 0,
        "max_global_steps": 0,
        "status": "success",
        "prompt_len": len(prompts),
        "response_len": len(responses),
        "seq_len": len(input_ids),
        "uid": uid,
        "materialization_reason": "session_end",
    }
    return field, tag


class MRopeProcessor:
    """What verl needs of a processor that knows M-RoPE: transformers' own position ids, bound as `hf_processor` does.

    A whole processor cannot be made without torchvision.
    """

    def __init__(self) -> None:
        self.config = Qwen2_5_VLConfig()
        self.get_rope_index = types.MethodType(Qwen2_5_VLModel.get_rope_index, self)

    def __call__(self, *, text: list[str], images: None, videos: None, **_options: Any) -> BatchFeature:
        """Return the inputs of a text without media."""
        assert images is None
        assert videos is None
        ids = torch.zeros((1, len(text[0])), dtype=torch.int64)
        return BatchFeature({"input_ids": ids, "attention_mask": ids, "mm_token_type_ids": ids})


class VerlWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's own agent loop worker in this process, with what writes rows."""

    def __init__(self, processor: MRopeProcessor | None, *, tokenizer: Any) -> None:
        self.processor, self.tokenizer, self.mm_processor_kwargs = processor, tokenizer, {}
        self.reward_loop_worker_handles, self.distillation_enabled = None, False


def write_verl_rows(*, tokenizer: Any) -> None:
    """Write the sessions by verl's own worker, whose processor knows M-RoPE; it copies the last reward of a session."""
    worker = VerlWorker(MRopeProcessor(), tokenizer=tokenizer)
    _mark_prompts({"is_prompt": True, "status": "pending", "global_steps": 1})

    async def write() -> None:
        for (uid, session), trajectories in SESSIONS.items():
            outputs = [
                AgentLoopOutput(
                    prompt_ids=list(each.prompt),
                    response_ids=list(each.response),
                    response_mask=each.mask,
                    response_logprobs=each.log_probs,
                    reward_score=each.reward,
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={
                        "min_global_steps": 0,
                        "max_global_steps": 0,
                        "reward_extra_info": {"acc": each.reward},
                    },
                )
                for each in trajectories
            ]
            names = {"uid": uid, "session_id": session, "global_steps": 1, "data_source": "verl"}
            await worker._agent_loop_postprocess(outputs, False, **names)

    asyncio.run(write())
    _mark_prompts({"status": "finished"})


def _mark_prompts(tag: dict[str, Any]) -> None:
    """Tag the prompts, as verl's trainer does when it submits them and a manager when they have ended."""
    for uid in UIDS:
        tq.kv_put(key=uid, partition_id="train", tag=tag)
