"""Rows that ask what the right answer would have been without a turn (`tree_counterfactual`), beside those of a step.

The ranks write them, each those of its portion of the prompts. The policy computes them as it computes log-probs of any
rows. When the ranks compute advantages, they read what it found. They lie in a partition of TransferQueue of their own
and are gone after that.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from verl_tree.trainer.advantages import Owed, Turn, contexts_of, find_answers
from verl_tree.trainer.row_keys import parse_row_key
from verl_tree.trainer.rows.step_rows import StepRows, arrays, fetch
from verl_tree.trainer.rows.step_tokens import is_trained_of

PARTITION = "counterfactuals"


class _Question(NamedTuple):
    """How likely is the answer behind the context?"""

    key: str  # `{uid}_{session}_{number}`; 0 is the whole context of the session
    context: np.ndarray
    answer: np.ndarray
    turn: Turn | None  # without which; its row is one of the portion


def write_counterfactuals(_trainer: PPOTrainer, batch: KVBatchMeta, _metrics: dict[str, Any]) -> None:
    """Write the questions about a portion's rows."""
    keys, rows, tags = [], [], []
    for question in _questions(StepRows.fetch(batch)):
        context, answer = (torch.from_numpy(part.astype(np.int64)) for part in (question.context, question.answer))
        input_ids, mask = torch.cat([context, answer]), torch.ones(len(answer), dtype=torch.int64)
        keys.append(question.key)
        rows.append(
            {
                "prompts": context,
                "responses": answer,
                "input_ids": input_ids,
                "position_ids": torch.arange(len(input_ids)),
                "response_mask": mask,
                "loss_mask": mask,
            }
        )
        tags.append({"prompt_len": len(context), "response_len": len(answer), "seq_len": len(input_ids)})
    if keys:
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=list_of_dict_to_tensordict(rows), tags=tags)


def written_counterfactuals() -> KVBatchMeta:
    """Return all questions, those of a session together; the driver lets the policy answer them."""
    tags = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
    keys = sorted(tags, key=parse_row_key)
    return KVBatchMeta(keys=keys, tags=[tags[key] for key in keys], partition_id=PARTITION, extra_info={})


def read_owed(rows: StepRows) -> list[Owed]:
    """Read what the turns of a portion's rows are owed, once the policy has computed log-probs."""
    questions = list(_questions(rows))
    if not questions:
        return []
    columns = fetch([each.key for each in questions], ("log_probs", "response_mask"), partition_id=PARTITION)
    answers = response_from_nested(columns["log_probs"], columns["response_mask"]).unbind(dim=0)
    log_probs = [float(each.sum(dtype=torch.float64)) for each in answers]
    owed, whole = [], 0.0
    for (_, _, _, turn), log_prob in zip(questions, log_probs, strict=True):
        if turn is None:
            whole = log_prob
        else:
            owed.append(Owed(turn.row, turn.start, turn.end, whole - log_prob))
    return owed


def _questions(rows: StepRows) -> Iterator[_Question]:
    """Yield the questions about sessions with turns, in prompts whose rewards differ; the whole context first."""
    rewards = rows.rewards
    groups = [group for group in rows.groups if len(set(rewards[group].tolist())) > 1]
    asked = [row for group in groups for row in group]
    if not asked:
        return
    columns = fetch([rows.keys[row] for row in asked], ("input_ids", "response_mask"), partition_id=rows.partition_id)
    tokens = dict(zip(asked, arrays(columns, "input_ids"), strict=True))
    masks = dict(zip(asked, arrays(columns, "response_mask"), strict=True))
    for group in groups:
        places = [parse_row_key(rows.keys[row]) for row in group]
        ids = [tokens[row] for row in group]
        trained = [is_trained_of(masks[row], num_tokens=len(tokens[row])) for row in group]
        answers = find_answers(ids, trained, sessions=[place.session for place in places])
        if not answers:
            continue  # nothing is trained
        best = max(answers, key=lambda answer: rewards[group[answer.row]])
        right = ids[best.row][best.start : best.end]
        for answer in (each for each in answers if each.turns):
            turns = [None, *(turn._replace(row=group[turn.row]) for turn in answer.turns)]
            place = places[answer.row]
            for number, context in enumerate(contexts_of(answer, ids[answer.row])):
                yield _Question(f"{place.uid}_{place.session}_{number}", context, right, turns[number])
