"""A session of an agent loop, run as verl's worker runs it, without Ray, a queue or a cluster."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, cast

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker, _agent_loop_registry
from verl.trainer.ppo.utils import create_rl_dataset
from verl.workers.rollout.llm_server import LLMServerClient

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.outputs import SessionFailed, TreeAgentLoopOutput
from rollout_hooks.capture.recording import recording_client
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.capture.rows import CALLS_FIELD, RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.capture.tracebacks import user_traceback
from rollout_hooks.loops import register_built_in
from rollout_hooks.loops.base import did_you_mean
from rollout_hooks.trial.deadline import deadline
from rollout_hooks.trial.tree_text import TextPath, draw, num_nodes_and_tokens

register_built_in()


@dataclass(frozen=True, slots=True)
class TriedSession:
    """What a session left: the recorded calls, the rows that would be trained, and the error if it failed.

    `warning` is what a training run may refuse.
    """

    tree: SessionTree
    rows: tuple[AgentLoopOutput, ...]
    error: BaseException | None
    warning: str | None = None

    def describe(self, *, decode: Callable[[list[int]], str]) -> list[str]:
        """Return the tree of the session as text, and why calls or the session failed."""
        paths, calls = self._paths(), self.tree.calls
        num_nodes, num_tokens = num_nodes_and_tokens(paths)
        num_flat = sum(len(path.token_ids) for path in paths)
        sizes = f"{num_nodes} nodes, {num_tokens} tree tokens, {num_flat} flat tokens"
        lines = [f"{len(calls)} calls, {len(self.rows)} rows to train, {sizes}", ""]
        lines += draw(paths, decode=decode, kinds={call.index: call.kind.value for call in calls})
        lines += [f"call {call.index} ({call.status}): {call.cause}" for call in calls if call.cause is not None]
        if self.warning is not None:
            lines += ["", f"Warning: {self.warning}"]
        if self.error is not None:
            frames = user_traceback(self.error)
            lines += [
                "",
                f"The session failed: {describe_error(self.error)}",
                *([indent(frames, "  ")] if frames else []),
            ]
        return lines

    def _paths(self) -> list[TextPath]:
        """Return the rows to be drawn, without any the recorded leaves; then those that are left out."""
        drawn = [_path_of_row(row, number) for number, row in enumerate(self.rows)]
        others = [] if drawn else [(path, "not trained") for path in self.tree.leaves()]
        others += [(path, f"not trained: {reason}") for path, reason in self.tree.left_out_leaves()]
        return drawn + [
            TextPath.of_stretches(
                path.token_ids.tolist(),
                [(call, position, position + 1) for position, call in enumerate(path.source.tolist()) if call >= 0],
                prompt_len=path.prompt_len,
                end=end,
            )
            for path, end in others
        ]


class TrialWorker(AgentLoopWorker):
    """verl's worker, of which each session returns what its loop returned; `run_session` gives it a client."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config, llm_client=cast(LLMServerClient, None))

    @override
    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        return output


class _VerlSearchPath(SearchPathPlugin):
    """Hydra plugin that finds verl's configurations for a file of the user's, whatever search path the file gives."""

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl", path="pkg://verl.trainer.config")


def compose_trial(
    *, loops: str, model: str, data: str, overrides: Sequence[str], file: Path | None = None
) -> DictConfig:
    """Compose the configuration of a trial: that of a file of the user's, else verl's; overrides are Hydra's, and win.

    A file may build on verl's `ppo_trainer`. What else it builds on must be on Hydra's search path.
    """
    Plugins.instance().register(_VerlSearchPath)
    if file is None:
        initialized, name = hydra.initialize_config_module("verl.trainer.config", version_base=None), "ppo_trainer"
    else:
        initialized, name = hydra.initialize_config_dir(str(file.parent.resolve()), version_base=None), file.stem
    with initialized:
        config = hydra.compose(name, overrides=["actor_rollout_ref.rollout.name=vllm", *overrides])
    with open_dict(config):
        config.actor_rollout_ref.model.path = model
        config.actor_rollout_ref.rollout.agent.agent_loop_config_path = loops
        config.data.train_files = data
    return config


def read_row(config: DictConfig, number: int, *, worker: TrialWorker) -> dict[str, Any]:
    """Return a row of the data as a loop's `run` gets it.

    Raises:
        ValueError: The file has no such row.
    """
    files = config.data.train_files
    data: Any = create_rl_dataset(files, config.data, worker.tokenizer, worker.processor)
    if not 0 <= number < len(data):
        raise ValueError(f"row {number} of {files}: it has {len(data)}; give a number below, counted from 0")
    return {**data[number], "uid": "trial", "session_id": 0, "global_steps": 0}


def read_names(loops: str) -> list[str]:
    """Return the names of the loops of a file.

    Raises:
        ValueError: It is not a list of loops.
    """
    entries: Any = OmegaConf.to_container(OmegaConf.load(loops))
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_list or not all({"name", "_target_"} <= set(entry) for entry in entries):
        raise ValueError(f"{loops}: give a YAML list, each entry with `name` and `_target_` (docs/agent_loops.md)")
    return [entry["name"] for entry in entries]


def choose_loop(names: Sequence[str], *, asked: str | None, row: Mapping[str, Any], default: str) -> str:
    """Return the loop that is asked for, else the row's, else the only one of the file, whose loops have these names.

    Where the file has several, `default` is taken if it is one of them (`rollout.agent.default_agent_loop`).

    Raises:
        ValueError: There is none of that name, or more than one to choose from.
    """
    name = asked or row.get("agent_name") or (names[0] if len(names) == 1 else None)
    name = name or (default if default in names else None)
    if name is None:
        raise ValueError(f"the file has {len(names)} loops: choose one by --agent {' | '.join(names)}")
    if name not in _agent_loop_registry:
        meant = did_you_mean(name, _agent_loop_registry)
        raise ValueError(f"no agent loop {name}; {meant}choose one of {', '.join(sorted(_agent_loop_registry))}")
    return name


def run_session(
    config: DictConfig,
    client: LLMServerClient,
    row: Mapping[str, Any],
    *,
    loop: str,
    worker: TrialWorker,
    timeout_s: float,
) -> TriedSession:
    """Run one session; its calls are recorded, and its rows are made as in a training run.

    If it takes longer than `timeout_s`, its calls and the place where it waits are printed, and the process ends.
    """
    worker.llm_client = client
    worker.llm_client = recorder = recording_client(worker)
    rollout = config.actor_rollout_ref.rollout
    limits = RowLimits(rollout.prompt_length, rollout.response_length, wants_log_probs=True)
    sampling = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
    fields = {name: value for name, value in row.items() if name != "agent_name"}
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}

    def describe_so_far(cause: str) -> str:
        so_far = TriedSession(recorder.tree, (), SessionFailed(cause))
        return "\n".join(so_far.describe(decode=worker.tokenizer.decode))

    async def run() -> TriedSession:
        session = worker._run_agent_loop(sampling, trajectory, agent_name=loop, trace=False, **fields)
        with deadline(timeout_s, describe=describe_so_far):
            # The error comes back as a value: it is what the trial shows.
            (result,) = cast("list[Any]", await asyncio.gather(session, return_exceptions=True))
        error: BaseException | None = None
        outputs: list[AgentLoopOutput] = []
        if isinstance(result, SessionFailed):
            error, outputs = result, [*result.outputs]  # its leaves with a reward of their own are trained
        elif isinstance(result, BaseException):
            error = result
        else:
            outputs = result if isinstance(result, list) else [result]
        if error is not None and not outputs:
            return TriedSession(recorder.tree, (), error)
        try:
            rows = session_rows(recorder.tree, outputs, limits=limits).outputs
        except ValueError as refused:
            return TriedSession(recorder.tree, (), refused)
        return TriedSession(recorder.tree, tuple(rows), error, _reward_warning(rows, config, row))

    return asyncio.run(run())


def _reward_warning(rows: Sequence[AgentLoopOutput], config: DictConfig, row: Mapping[str, Any]) -> str | None:
    """Say who scores a session that gave its last leaf no reward, if anybody does."""
    if not rows or rows[-1].reward_score is not None:
        return None
    if config.reward.num_workers == 0:
        return "the last leaf has no reward, and with reward.num_workers=0 a training run refuses the session"
    return (
        "the last leaf has no reward: a training run asks verl's reward function for it "
        f"(data_source={row.get('data_source')!r}), and refuses the session with reward.num_workers=0"
    )


def _path_of_row(row: AgentLoopOutput, number: int) -> TextPath:
    prompt_len = len(row.prompt_ids)
    own = row.leaf_reward if isinstance(row, TreeAgentLoopOutput) else row.reward_score
    reward = "reward of verl's reward function, which a trial does not run" if own is None else f"reward {own:g}"
    nodes = row.node_rewards if isinstance(row, TreeAgentLoopOutput) else ()
    if not any(row.response_mask):
        reward = "not trained"
    role = row.extra_fields.get(ROLE)
    return TextPath.of_stretches(
        [*row.prompt_ids, *row.response_ids],
        [(call, start, stop) for call, _, start, stop, *_ in row.extra_fields.get(CALLS_FIELD, ())],
        prompt_len=prompt_len,
        end=f"leaf {number}{'' if role is None else f' ({role})'}: {reward}",
        rewards=tuple((prompt_len + position, value) for position, value in nodes),
    )
