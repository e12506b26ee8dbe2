"""Trees of the plain agent: the sessions of a task share its prompt, documents are as long as asked for."""

import random
import sys
from pathlib import Path

import pytest
import record_chains
from recipe_cases import TINY

from recipes.demo.settings import Settings
from recipes.demo.sums import prepare
from recipes.demo.tokenizer import build_tokenizer
from verl_tree.records import read_trees


def test_a_document_has_the_tokens_asked_for() -> None:
    tokenizer = build_tokenizer()
    text = record_chains.document(random.Random(0), tokenizer=tokenizer, num_tokens=300)
    # Twenty sums at a time, each of at most 12 tokens.
    assert 300 <= len(tokenizer(text)["input_ids"]) < 300 + 20 * 12
    assert record_chains.document(random.Random(0), tokenizer=tokenizer, num_tokens=0) == ""


def test_sessions_of_a_task_share_its_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(num_train_tasks=4, num_validation_tasks=1, warm_start=TINY)
    folder, out = prepare(tmp_path, settings=settings), tmp_path / "trees.parquet"
    arguments = ["--tasks", "2", "--sessions", "2", "--document-tokens", "100", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["record_chains.py", str(folder), *arguments])
    record_chains.main()
    trees = read_trees(out)
    assert [len(tree.leaves) for tree in trees] == [2, 2]
    for tree in trees:
        one, other = tree.leaves
        assert one.prompt_len == other.prompt_len > 100
        assert one.token_ids[: one.prompt_len].tolist() == other.token_ids[: one.prompt_len].tolist()
        assert tree.forest().num_tokens < tree.forest().num_flat_tokens - 100
        # The prompt is not trained; at least one token of a turn and its end are.
        assert not one.is_trained[: one.prompt_len].any()
        assert one.is_trained.sum() >= 1
