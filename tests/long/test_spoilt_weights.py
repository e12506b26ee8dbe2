"""A rollout engine that computes with other weights than the trainer's ends the run, and so does a wrong kernel."""

import re
from pathlib import Path

import pytest
from tiny_run import run_to_error

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_run_whose_engine_computes_with_other_weights_says_so(folder: Path) -> None:
    """The engine gets what the trainer sends once; from then on one weight is another."""
    spoilt = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=spoilt_reload.SpoiltReloadExtension"
    metrics, log = run_to_error(folder, "spoilt", "actor_rollout_ref.actor.optim.lr=1e-3", spoilt)
    assert list(metrics) == [1]
    assert metrics[1]["tree/log_prob_difference"] < 1e-4
    assert re.search(
        r"ValueError: vllm with .*/model \(dtype=float32, .* does not compute with the trainer's weights", log
    )
    assert "sampled under version 1 have a mean log-prob" in log


def test_a_run_whose_kernel_is_wrong_says_so_and_keeps_the_tree(folder: Path) -> None:
    """Log-probs are hardly other ones, which the comparison with the rollout engine does not see."""
    dump = folder / "kept"
    settings = ("actor_rollout_ref.model.external_lib=spoilt_kernel", f"tree.dump_dir={dump}")
    metrics, log = run_to_error(folder, "spoilt_kernel", *settings)
    assert not metrics
    assert re.search(r"ValueError: tree\.canary: log_probs of a row are .* times what rounding makes of them", log)
    (kept,) = dump.glob("canary_*.parquet")
    assert f"`verl-tree canary {kept} --model FOLDER` computes it again" in log
