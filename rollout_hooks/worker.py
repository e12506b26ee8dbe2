"""verl's agent loop worker and manager, with every session recorded and no failure lost.

`rollout.agent.agent_loop_manager_class` names `TreeAgentLoopManager`. Each session runs on a shallow copy of its worker
whose LLM client records. So verl's loops run unchanged, and concurrent sessions do not mix.

A failed session takes only itself down. Its prompt ends as "finished" with the rows of the other sessions, and as
"failure" only if all failed. verl alone marks the prompt as "failure" for one failed session and keeps no cause.
"""

import asyncio
import copy
import logging
import time
import uuid
from contextlib import suppress
from typing import Any, cast

import ray
import torch
import transfer_queue as tq
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.image_runs import IMAGES_FIELD, image_runs, thumbnail, tree_keys
from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG, WrittenRow, leaf_shapes
from rollout_hooks.capture.outputs import PromptFailed, SessionFailed, TreeAgentLoopOutput, is_reward, row_reward
from rollout_hooks.capture.recording import recording_client
from rollout_hooks.capture.report import ENDED, CaptureReport, FailedSession
from rollout_hooks.capture.retries import RetryingManager
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.capture.rows import RowLimits, images_of_row, session_rows
from rollout_hooks.capture.running import RUNNING, OpenSessions, PromptProgress, Session, keep_for_the_report
from rollout_hooks.capture.tracebacks import raised_at, user_traceback, waiting_places
from rollout_hooks.capture.wire_storage import writing
from rollout_hooks.loops import register_built_in

logger = logging.getLogger(__name__)

# In every worker process: it imports this module.
register_built_in()

PARTITIONS = ("train", "val")

MAX_TRACEBACKS = 20
"""Most tracebacks of one worker's report: causes that name a session, or a random number, are all different."""


# A Ray actor class cannot be subclassed, but the class it was made of can. Ray's types do not know that attribute.
_AgentLoopWorker = cast(Any, AgentLoopWorkerTQ).__ray_metadata__.modified_class


def _told_in_the_report(record: logging.LogRecord) -> bool:
    """Make one quiet line of what verl logs of a prompt that failed: an error, and a traceback through this module."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, PromptFailed):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


logging.getLogger(_AgentLoopWorker.__module__).addFilter(_told_in_the_report)
agent_loop.logger.addFilter(keep_for_the_report)


class TreeAgentLoopWorkerBase(_AgentLoopWorker):
    """verl's worker with capture; `TreeAgentLoopWorker` is the Ray actor class made of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reports: dict[str, CaptureReport] = dict.fromkeys(PARTITIONS, CaptureReport())
        self._prompts: dict[str, PromptProgress] = {}
        self._open: dict[tuple[str, int], Session] = {}
        """The sessions that run, the oldest first."""
        self._session: Session | None = None
        """Set on the copies that run sessions, never on the worker itself."""
        self._has_told_drift = False
        self._num_ended, self._name = 0, uuid.uuid4().hex

    async def drain_capture_report(self, partition: str) -> CaptureReport:
        """Return and clear the report of this worker; see `TreeAgentLoopManager.drain_capture_report`."""
        report, self._reports[partition] = self._reports[partition], CaptureReport()
        return report

    async def open_sessions(self) -> OpenSessions:
        """Return what this worker waits for; no Ray task runs meanwhile, because verl starts sessions and returns."""
        if not self._open:
            return OpenSessions(0)
        oldest = next(iter(self._open.values()))
        places = waiting_places(asyncio.all_tasks())
        return OpenSessions(len(self._open), str(oldest), time.monotonic() - oldest.started_s, places)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        """Run the sessions of one prompt, keep count of those that fail, and say that it has ended."""
        rollout = self.config.actor_rollout_ref.rollout
        num_sessions = rollout.val_kwargs.n if trajectory["validate"] else rollout.n
        uid = prompt["uid"]
        self._prompts[uid] = PromptProgress(int(prompt.get("__rollout_n__", num_sessions)), [])
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            del self._prompts[uid]
            self._num_ended += 1
            await tq.async_kv_put(key=self._name, partition_id=ENDED, tag={"num": self._num_ended})

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs: Any,
    ) -> None:
        """Run and record one session; raise only if all sessions of the prompt have failed without a row.

        Other failures are only reported, because verl marks the whole prompt as failed for any error.
        """
        session = Session(
            uid=kwargs["uid"],
            session_id=int(kwargs["session_id"]),
            partition="val" if trajectory["validate"] else "train",
            client=recording_client(self, prompt=kwargs["uid"]),
            wants_log_probs=bool(sampling_params.get("logprobs")),
            agent_name=agent_name,
        )
        self._open[session.uid, session.session_id] = session
        RUNNING.set(session)
        runner = copy.copy(self)
        runner.llm_client, runner._session = session.client, session
        run = runner._run_session(sampling_params, trajectory, agent_name=agent_name, trace=trace, **kwargs)
        try:
            # The error comes back as a value, because it must not reach the other sessions of the prompt.
            (error,) = await asyncio.gather(run, return_exceptions=True)
        finally:
            del self._open[session.uid, session.session_id]
        progress = self._prompts[session.uid]
        progress.num_ended += 1
        self._settle(session, error)
        if progress.num_ended == progress.num_sessions and progress.rows:
            await self._put_leaf_shapes(session.uid, progress)

    async def _run_session(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> None:
        """Run one session on the copy; if it fails, keep the leaves that have a reward of their own."""
        try:
            await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except SessionFailed as error:
            # Validation takes a session's last row for its result, so a failed session writes none there.
            if error.outputs and not trajectory["validate"]:
                row = {name: value for name, value in kwargs.items() if name not in ("agent_name", "trace")}
                await self._agent_loop_postprocess([*error.outputs], trajectory["validate"], **row)
            raise

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> None:
        """Merge the loop's outputs with the recorded calls, and let verl write the rows."""
        session = self._session
        assert session is not None, "rows are written by the copy of the worker that runs the session"
        outputs = output if isinstance(output, list) else [output]
        rows = session_rows(
            session.client.tree,
            outputs,
            limits=RowLimits(
                prompt_length=self.rollout_config.prompt_length,
                response_length=self.rollout_config.response_length,
                wants_log_probs=session.wants_log_probs,
            ),
        )
        if not rows.outputs:
            raise SessionFailed("no trajectory with a trained token: the model generated nothing that can be trained")
        self._check_rewards(rows.outputs)
        # verl asks a teacher's servers about the last row only.
        others = [
            self._compute_teacher_logprobs(row, row.prompt_ids, row.response_ids, validate, sample_kwargs=kwargs)
            for row in rows.outputs[:-1]
        ]
        await asyncio.gather(*others)
        with writing(self._prompts[session.uid].columns):
            await super()._agent_loop_postprocess(rows.outputs, validate, **kwargs)
        session.rows = rows
        await self._put_roles(session, rows.outputs)
        if not validate:
            written = self._prompts[session.uid].rows
            for leaf, row in enumerate(rows.outputs):
                written[session.session_id, leaf] = WrittenRow.of(
                    tree_keys(row.prompt_ids + row.response_ids, row.extra_fields),
                    response_mask=row.response_mask,
                    reward=row_reward(row),
                )

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        """Let verl score the session, and refuse a reward that would make every advantage of its group NaN."""
        await super()._compute_score(outputs, kwargs=kwargs)
        reward = outputs[-1].reward_score
        if reward is not None and not is_reward(reward):
            raise ValueError(
                f"the reward of the session is {reward!r}: let the reward function (reward.custom_reward_function), or "
                "the loop, give a finite number"
            )

    def _compute_multi_modal_inputs(self, output: AgentLoopOutput, input_ids: torch.Tensor) -> dict[str, Any]:
        """Let verl compute the pixels of a row's images, and note where they stand, what they are and how they look."""
        inputs = super()._compute_multi_modal_inputs(output, input_ids)
        runs = image_runs(input_ids, inputs, processor=self.processor)
        if runs:
            output.extra_fields[IMAGES_FIELD] = runs
        if self.processor is not None and isinstance(output, TreeAgentLoopOutput):
            # All rows have the column, those without an image, too.
            pairs = zip(runs, images_of_row(output), strict=True)
            output.image_thumbnails = {number: thumbnail(image) for (_, _, number), image in pairs}
        return inputs

    async def _put_roles(self, session: Session, rows: list[AgentLoopOutput]) -> None:
        """Tag the rows of a session that have a role with it, before anyone hears that the session has ended."""
        roles = {leaf: row.extra_fields[ROLE] for leaf, row in enumerate(rows) if row.extra_fields.get(ROLE)}
        if roles:
            await tq.async_kv_batch_put(
                keys=[f"{session.uid}_{session.session_id}_{leaf}" for leaf in roles],
                partition_id=session.partition,
                tags=[{ROLE: role} for role in roles.values()],
            )

    async def _put_leaf_shapes(self, uid: str, progress: PromptProgress) -> None:
        """Tag the rows of a prompt whose sessions have all ended with their shapes."""
        places = sorted(progress.rows)
        shapes = leaf_shapes([progress.rows[place] for place in places])
        await tq.async_kv_batch_put(
            keys=[f"{uid}_{session}_{leaf}" for session, leaf in places],
            partition_id="train",
            tags=[{LEAF_SHAPE_TAG: shape.tobytes()} for shape in shapes],
        )

    def _tell_drift(self, session: Session) -> None:
        """Log one example of drift in the life of this worker."""
        example = session.client.tree.drift_example
        if example is None or self._has_told_drift:
            return
        self._has_told_drift = True
        logger.warning(
            "a prompt of session %s_%d had other tokens than the recorded ones for the same text %r: %s instead of %s; "
            "%s. See docs/capture.md and the metrics tree/realigned and tree/drift.",
            session.uid,
            session.session_id,
            example.text,
            list(example.given_ids),
            list(example.recorded_ids),
            "the recorded ones were sent" if example.is_healed else "it was sent as it is and starts a new leaf",
        )

    def _check_rewards(self, outputs: list[AgentLoopOutput]) -> None:
        handles = self.reward_loop_worker_handles
        has_own_reward = any(isinstance(row, TreeAgentLoopOutput) and row.leaf_reward is not None for row in outputs)
        if handles is None and has_own_reward:
            raise ValueError(
                "a leaf has a reward of its own, but reward.reward_model shares the actor's resource pool and scores "
                "all rows later: set reward.reward_model.enable_resource_pool=True, or let loops give no rewards"
            )
        if handles is not None and not handles and outputs[-1].reward_score is None:
            raise ValueError(
                "the session's last leaf has no reward and reward.num_workers=0: finish it with a reward, or set "
                "reward.num_workers to at least 1 for verl's reward function"
            )

    def _settle(self, session: Session, error: BaseException | None) -> None:
        """Count the session, report its failure, and raise if all sessions of its prompt have failed."""
        self._tell_drift(session)
        tree, rows = session.client.tree, session.rows
        num_rows = len(rows.outputs) if rows is not None else 0
        report = CaptureReport.of_calls(tree) + CaptureReport(
            num_sessions=1,
            num_leaves=num_rows,
            num_dropped_leaves=rows.num_dropped if rows is not None else len(tree.leaves()),
            num_truncated_leaves=rows.num_truncated if rows is not None else 0,
            cut_prompts=tuple(session.cut_prompts),
            dead_servers=(session.client.dead_server,) if session.client.dead_server is not None else (),
        )
        progress = self._prompts[session.uid]
        if error is not None:
            failed = self._tell_failure(session, error, num_rows=num_rows)
            report += CaptureReport(failed_sessions=(failed,))
            if num_rows == 0:
                progress.causes.append(failed.cause)
        has_failed = len(progress.causes) == progress.num_sessions
        if has_failed:
            report += CaptureReport(failed_prompts=(session.uid,))
        self._reports[session.partition] += report
        if has_failed:
            raise PromptFailed(
                f"all {progress.num_sessions} sessions of the prompt failed, first: {progress.causes[0]}"
            )

    def _tell_failure(self, session: Session, error: BaseException, *, num_rows: int) -> FailedSession:
        """Return the failure, with its traceback and a line in the log if it is the first of its kind in the report."""
        cause, place = describe_error(error), raised_at(error)
        earlier = self._reports[session.partition].failed_sessions
        is_first = all((each.cause, each.place) != (cause, place) for each in earlier)
        is_told = is_first and sum(bool(each.traceback) for each in earlier) < MAX_TRACEBACKS
        where = user_traceback(error) if is_told else ""
        log = logger.warning if is_told else logger.info
        log("session %s_%d failed: %s", session.uid, session.session_id, f"{cause}\n{where}".rstrip())
        num_calls = len(session.client.tree.calls)
        return FailedSession(session.uid, session.session_id, cause, num_calls, num_rows, place=place, traceback=where)


TreeAgentLoopWorker = ray.remote(TreeAgentLoopWorkerBase)


class TreeAgentLoopManager(RetryingManager):
    """verl's manager with our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # After super().__init__, which sets verl's class.
        self.agent_loop_workers_class = TreeAgentLoopWorker

    def drain_capture_report(self, partition: str = "train") -> CaptureReport:
        """Return what was captured and lost since the last call, summed over the workers.

        The sessions of a prompt are in the report before the prompt's status says that it has ended. What a worker that
        has died had counted since the last call is lost.

        Raises:
            ValueError: `partition` is neither "train" nor "val".
        """
        if partition not in PARTITIONS:
            raise ValueError(f"partition={partition!r}: must be one of {PARTITIONS}")
        report = CaptureReport(num_retried_prompts=self._num_retried[partition])
        self._num_retried[partition] = 0
        for told in [worker.drain_capture_report.remote(partition) for worker in self.agent_loop_workers]:
            with suppress(ActorDiedError, ActorUnavailableError):
                report += cast(CaptureReport, ray.get(told))
        return report
