"""What a resumed run makes of the prompts and rows in its checkpoint."""

from typing import Any

import pytest

pytest.importorskip("verl")

import transfer_queue as tq

from verl_tree.trainer.starts.restored import next_prompt_number, numbered_uid, take_over_restored, trained_rows

UID = "8c0f7e64-6a4b-4b0e-9a44-d1d2f0a3b111"


def test_numbers_go_on_after_the_largest_restored_one() -> None:
    keys = [numbered_uid(7, UID), f"{numbered_uid(12, UID)}_1_0", numbered_uid(3, UID)]
    assert next_prompt_number(keys) == 13
    assert next_prompt_number([]) == 0
    assert next_prompt_number([numbered_uid(10**9, UID)]) == 10**9 + 1


def test_a_uid_that_another_trainer_made_has_no_number() -> None:
    assert next_prompt_number(["12345678-6a4b-4b0e-9a44-d1d2f0a3b111", "12345678-6a4b-4b0e-9a44-d1d2f0a3b111_0_0"]) == 0


def test_rows_of_prompts_that_were_sampled_are_left_over() -> None:
    prompt = {"is_prompt": True, "status": "finished", "global_steps": 2}
    running = {**prompt, "status": "running"}
    tags = {"a": prompt, "a_0_0": {}, "b": running, "b_1_0": {}, "c_0_0": {}, "c_0_1": {}, "d": running}
    assert trained_rows(tags) == ["c_0_0", "c_0_1"]


@pytest.mark.parametrize("is_empty", [True, False])
def test_what_is_left_over_is_cleared_and_its_numbers_are_not_used_again(
    is_empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, trained = numbered_uid(3, UID), f"{numbered_uid(8, UID)}_0_0"
    tags = {} if is_empty else {"train": {prompt: {"is_prompt": True}, f"{prompt}_0_0": {}, trained: {}}}
    cleared: list[dict[str, Any]] = []
    monkeypatch.setattr(tq, "kv_list", lambda partition_id: tags)  # noqa: ARG005
    monkeypatch.setattr(tq, "kv_clear", lambda **arguments: cleared.append(arguments))
    assert take_over_restored("train") == (0 if is_empty else 9)
    assert cleared == ([] if is_empty else [{"keys": [trained], "partition_id": "train"}])
