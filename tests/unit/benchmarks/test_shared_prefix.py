"""Costs of groups with one prompt: formulas beside counts of real models, and the benchmark on a tiny grid.

The counts are the claims of Prefix Grouper, section 3.1 (equations 15 to 21).
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import report_shared_prefix
import shared_prefix
import torch
from harness import read_records
from por_models import Counts, model_flops, new_model
from prefix_costs import count_flops, repeated, shared
from prefix_paths import GroupRows, update
from transformers import PreTrainedModel

GROUPS = [(4, 12, 5), (2, 6, 9), (3, 7, 1), (8, 33, 4), (1, 5, 6)]
"""Rows, tokens of the prompt, tokens of a response."""


def tiny() -> PreTrainedModel:
    return new_model("tiny", dtype=torch.float32, device=torch.device("cpu"))


def rows_of(num_rows: int, prompt_len: int, response_len: int) -> GroupRows:
    return shared_prefix.group(num_rows, prompt_len=prompt_len, response_len=response_len)


def test_counts_by_hand() -> None:
    """Two rows of 3 + 2 tokens see 1 + 2 + 3 + 4 + 5 keys each; shared, the prompt sees 6 and each response 4 + 5."""
    lens = {"prompt_len": 3, "response_len": 2}
    assert repeated(2, **lens) == Counts(num_tokens=10, num_pairs=30, num_projected=4)
    assert shared(2, **lens) == Counts(num_tokens=7, num_pairs=24, num_projected=3)
    assert repeated(2, **lens, square=True).num_pairs == 2 * 25
    assert shared(2, **lens, square=True).num_pairs == 9 + 2 * 2 * 5


@pytest.mark.parametrize(("num_rows", "prompt_len", "response_len"), GROUPS)
@pytest.mark.parametrize(("path", "formula"), [("none", repeated), ("prompt", shared), ("full", shared)])
def test_a_model_computes_what_the_formula_says(
    num_rows: int, prompt_len: int, response_len: int, path: str, formula: Callable[..., Counts]
) -> None:
    """Forward and backward, to the last operation."""
    model, rows = tiny(), rows_of(num_rows, prompt_len, response_len)
    counts = formula(num_rows, prompt_len=prompt_len, response_len=response_len)
    # The angles of RoPE are a product, too: D / 2 frequencies times the positions, once for all layers.
    angles = model.config.head_dim * counts.num_tokens
    assert count_flops(lambda: update(model, rows, path=path)) == model_flops(model, counts) + angles


@pytest.mark.parametrize(("num_rows", "prompt_len", "response_len"), GROUPS)
def test_sharing_saves_the_prompt_alone_for_every_row_but_one(
    num_rows: int, prompt_len: int, response_len: int
) -> None:
    """Repeated rows and the prompt alone run in transformers, with its own attention; nothing is a formula."""
    model, rows = tiny(), rows_of(num_rows, prompt_len, response_len)
    token_ids_BL = torch.from_numpy(np.stack(rows.sequences))

    def its_own(token_ids: torch.Tensor, *, first: int, last: int) -> int:
        """Count forward and backward with the logits of the positions first..last."""
        model.set_attn_implementation("sdpa")
        kept = torch.arange(first, last)
        return count_flops(
            lambda: model(input_ids=token_ids, use_cache=False, logits_to_keep=kept).logits.sum().backward()
        )

    flat = its_own(token_ids_BL, first=prompt_len - 1, last=prompt_len + response_len - 1)
    prompt = its_own(token_ids_BL[:1, :prompt_len], first=prompt_len - 1, last=prompt_len)
    # transformers computes the angles of RoPE once for all rows of a batch.
    angles = model.config.head_dim * (prompt_len + response_len) * (num_rows - 1)
    tree = count_flops(lambda: update(model, rows, path="prompt"))
    assert flat + angles - tree == (num_rows - 1) * prompt
    assert prompt > 0


@pytest.mark.parametrize("num_rows", [2, 4, 8, 16])
def test_with_long_prompts_the_cost_falls_to_that_of_one_row(num_rows: int) -> None:
    """The ratio is above 1 / G, falls with the prompt, and is within 1 % of it where a prompt is 4,096 responses."""
    model = report_shared_prefix.model_of("8B")

    def share(prompt_len: int, *, square: bool = False) -> float:
        lens = {"prompt_len": prompt_len, "response_len": 16, "square": square}
        flat, tree = (model_flops(model, count(num_rows, **lens)) for count in (repeated, shared))
        return tree / flat

    shares = [share(16 * ratio) for ratio in (1, 4, 16, 64, 4096)]
    assert sorted(shares, reverse=True) == shares
    assert 1 / num_rows < shares[-1] < 1.01 / num_rows
    # Without the causal half a count promises more.
    assert all(share(16 * ratio, square=True) < share(16 * ratio) for ratio in (1, 4, 16, 64, 4096))


def test_the_benchmark_goes_on_where_it_was_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data.jsonl"
    monkeypatch.setattr(sys, "argv", ["shared_prefix.py", "grid", "--small", "--repetitions=1", f"--out={out}"])
    threads = torch.get_num_threads()
    try:
        shared_prefix.main()
        found = [record for record in read_records(out) if record["kind"] == "grid"]
        shared_prefix.main()
    finally:
        torch.set_num_threads(threads)
    again = [record for record in read_records(out) if record["kind"] == "grid"]
    assert again == found
    by_path = {record["path"]: record for record in found if record["num_rows"] == 4 and record["response_len"] == 8}
    assert (by_path["none"]["num_tokens"], by_path["prompt"]["num_tokens"]) == (4 * 40, 32 + 4 * 8)
    assert by_path["prompt"]["peak_bytes"] < by_path["none"]["peak_bytes"]
    report_shared_prefix.report(found)
    assert "2.50" in capsys.readouterr().out.split("Groups with one prompt")[1]  # 160 / 64 tokens
