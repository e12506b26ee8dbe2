"""The real agent loop worker in this process, without its TransferQueue."""

import asyncio

from scripted_llm import ScriptedClient, config, tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset

from rollout_hooks.capture.report import CaptureReport
from rollout_hooks.capture.running import PromptProgress
from rollout_hooks.worker import TreeAgentLoopWorkerBase


class InProcessWorker(TreeAgentLoopWorkerBase):
    """A worker without a queue; it has the attributes that verl's `__init__` would read from a model folder."""

    def __init__(self, reply, *, num_sessions=2, reward_handles=()):
        self.config = config(n=num_sessions)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.llm_client = ScriptedClient(reply)
        self.reward_loop_worker_handles = None if reward_handles is None else list(reward_handles)
        self.tokenizer, self.processor, self.hf_model_type = tokenizer(), None, "qwen3"
        self.dataset_cls, self.tools, self.mm_processor_kwargs = RLHFDataset, [], {}
        self.distillation_enabled = False
        self._reports = {"train": CaptureReport(), "val": CaptureReport()}
        self._prompts = {}
        self._open = {}
        self._session = None
        self._has_told_drift = False


def run_sessions(worker, **options):
    """Run the sessions of one prompt, `prompt_of`, to their ends."""
    return asyncio.run(prompt_of(worker, **options))


async def prompt_of(
    worker, *, num_sessions, validate=False, agent_name="single_turn_agent", raw_prompt=None, **columns
):
    """Run the sessions of one prompt as verl's `_run_prompt` does, and return their errors."""
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": validate}
    worker._prompts["u"] = PromptProgress(num_sessions, [])
    sessions = (
        worker._run_agent_loop(
            {"logprobs": True},
            trajectory,
            agent_name=agent_name,
            trace=False,
            uid="u",
            session_id=i,
            raw_prompt=raw_prompt or [{"role": "user", "content": "q"}],
            global_steps=1,
            **columns,
        )
        for i in range(num_sessions)
    )
    return await asyncio.gather(*sessions, return_exceptions=True)
