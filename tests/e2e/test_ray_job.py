"""Training on a running Ray cluster: `ray start --head`, `ray job submit -- python -m verl_tree.main_ppo ...`."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from process_groups import free_port
from tiny_run import command, environment, make_inputs, read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a head node with two logical GPUs in a session folder of its own; return its dashboard's address."""
    # Ray 2.60 asks for a token by default; this cluster and the job share one of their own.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    temp_dir = Path("/tmp") / f"ray-{os.getpid()}"  # Ray's sockets do not fit into the length of pytest's paths
    address = f"http://127.0.0.1:{free_port()}"
    start = [RAY, "start", "--head", "--block", "--num-cpus=16", "--num-gpus=2", f"--temp-dir={temp_dir}"]
    # Jobs are submitted through the dashboard's agent, whose own port a second cluster on this machine would take.
    ports = [f"--port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
    dashboard_options = [f"--dashboard-port={address.rsplit(':', 1)[1]}", "--include-dashboard=true"]
    with (tmp_path / "head.log").open("w") as log:
        head = subprocess.Popen(
            start + ports + dashboard_options,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
        )
    try:
        _wait_for(f"{address}/api/version", log=tmp_path / "head.log", head=head)
        yield address
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        for process in psutil.process_iter(["cmdline"]):
            if str(temp_dir) in " ".join(process.info["cmdline"] or []):
                process.kill()
        head.wait(timeout=60)
        shutil.rmtree(temp_dir, ignore_errors=True)


def _wait_for(url: str, *, log: Path, head: subprocess.Popen, timeout_s: int = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 401:  # it is up, and wants the token that `ray job submit` sends
                raise
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            if head.poll() is not None or time.monotonic() > deadline:
                pytest.fail(log.read_text()[-4000:])
            time.sleep(0.5)


def test_a_submitted_job_trains_actor_and_critic_on_two_ranks(dashboard: str, tmp_path: Path) -> None:
    """GAE on two ranks: the critic trains on trees, too, and a mini-batch of one group is cut to feed both ranks."""
    make_inputs(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    options = (
        "algorithm.adv_estimator=gae",
        f"critic.model.path={tmp_path}/model",
        "critic.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "critic.ppo_max_token_len_per_gpu=256",
        "critic.optim.lr=1e-2",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
    )
    submitted = subprocess.run(
        [
            *(RAY, "job", "submit", f"--address={dashboard}"),
            f'--runtime-env-json={{"env_vars": {{"VERL_FILE_LOGGER_PATH": "{metrics}"}}}}',
            *("--", *command(tmp_path, *options)),
        ],
        env=environment(metrics),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stdout[-6000:] + submitted.stderr[-2000:]
    steps = read_metrics(metrics)
    assert set(steps) == {1, 2, 3}
    for step in steps.values():
        assert step["critic/vf_loss"] > 0
        assert step["critic/grad_norm"] > 0
        assert step["actor/grad_norm"] > 0
        assert step["tree/por"] > 0.4
        assert step["tree/leaves_per_session"] == 4.0
        assert step["tree/gap"] >= 0.0
        assert 0.0 < step["tree/fill"] <= 1.0
        assert step["tree/packing_s"] > 0.0
        # Both engines have the updated policy in float32, so only rounding is left. Weights of the step before would
        # differ by at least 1e-4.
        assert step["training/rollout_probs_diff_max"] < 1e-5
    # Later steps are dealt by measured times. By these, cutting a group into such small packs may not pay.
    assert steps[1]["tree/cut_groups"] == 4
    assert steps[1]["tree/cut_tokens"] > 0
    assert steps[1]["tree/rank_imbalance/predicted"] < 1.5
    assert 1.0 <= steps[1]["tree/rank_imbalance/measured"] < 2.0, "a rank had nothing to do"
    assert steps[3]["critic/vf_loss"] < steps[1]["critic/vf_loss"]
