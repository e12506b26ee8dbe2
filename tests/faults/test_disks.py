"""Full and hanging disks, damaged checkpoints: training goes on where it can, or from the newest whole checkpoint.

The runs are a chain in one folder: two steps are saved; the disk of the checkpoints is full in the third; it is
enlarged; the newest checkpoint is cut to half; at last the disk of the trees hangs. Mounting disks needs root.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_run import FaultyRun, last_saved
from replayed_runs import replaying_options

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk"),
]
END_LIMIT_S = 400.0


def mount(folder: Path, size_kib: int) -> None:
    """Mount a disk of this size in memory, or change the size of the one that is there."""
    change = ("-o", f"remount,size={size_kib}k") if folder.is_mount() else ("-t", "tmpfs", "-o", f"size={size_kib}k")
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *change, "tmpfs", str(folder)], check=True)


def used_kib(folder: Path) -> int:
    usage = shutil.disk_usage(folder)
    return usage.used // 1024


@pytest.fixture(scope="module")
def disks(folder: Path) -> Iterator[Path]:
    """Mount a disk for the checkpoints, and one of 16 KiB for the trees, which no step fits."""
    mount(folder / "checkpoints", 64 * 1024)
    mount(folder / "trees", 16)
    yield folder
    for name in ("checkpoints", "trees"):
        subprocess.run(["umount", "-l", str(folder / name)], check=True)


@pytest.fixture
def freezable(disks: Path) -> Iterator[Path]:
    """Mount a disk whose writers can be frozen: they wait in the kernel, as for a file server that is gone."""
    image, place = disks / "disk.img", disks / "hanging"
    with image.open("wb") as file:
        file.truncate(16 * 2**20)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def options(folder: Path, *, num_steps: int, trees: str = "trees") -> tuple[str, ...]:
    return (
        "actor_rollout_ref.actor.optim.optimizer=AdamW",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        f"trainer.total_training_steps={num_steps}",
        f"tree.dump_dir={folder}/{trees}",
        *replaying_options(f"{folder}/rollouts", num_steps=10),
    )


def ended(folder: Path, name: str, *, num_steps: int) -> tuple[int, FaultyRun]:
    """Run to the end and return the exit status and the run."""
    with FaultyRun(folder, name, options(folder, num_steps=num_steps)) as run:
        return run.process.wait(timeout=END_LIMIT_S), run


def test_a_full_dump_folder_does_not_end_training(disks: Path) -> None:
    status, run = ended(disks, "dump", num_steps=2)
    assert status == 0, run.log[-6000:]
    assert sorted(run.metrics) == [1, 2]
    assert "tree.dump_dir" in run.log
    assert last_saved(disks) == 2


def test_a_full_disk_of_checkpoints_is_named_and_the_earlier_one_resumes(disks: Path) -> None:
    checkpoints = disks / "checkpoints"
    one = (used_kib(checkpoints)) // 2
    mount(checkpoints, 2 * one + one // 2)
    status, run = ended(disks, "full", num_steps=4)
    assert status != 0
    last_lines = "\n".join(run.log.splitlines()[-40:])
    assert "trainer.default_local_dir" in last_lines
    assert str(checkpoints) in last_lines
    assert last_saved(disks) == 2

    mount(checkpoints, 64 * 1024)
    status, run = ended(disks, "enlarged", num_steps=4)
    assert status == 0, run.log[-6000:]
    assert sorted(run.metrics) == [3, 4]


def test_a_damaged_checkpoint_is_named_and_skipped(disks: Path) -> None:
    model = next((disks / "checkpoints" / "global_step_4").rglob("model_world_size_1_rank_0.pt"))
    content = model.read_bytes()
    model.write_bytes(content[: len(content) // 2])
    status, run = ended(disks, "damaged", num_steps=4)
    assert status == 0, run.log[-6000:]
    assert "global_step_4" in run.log
    assert sorted(run.metrics) == [4], "it went on from step 3"


def test_a_dump_folder_that_hangs_does_not_hold_up_training(disks: Path, freezable: Path) -> None:
    with FaultyRun(disks, "hanging", options(disks, num_steps=7, trees=freezable.name)) as run:
        run.wait_for("update", step=5)
        subprocess.run(["fsfreeze", "--freeze", str(freezable)], check=True)
        try:
            status = run.process.wait(timeout=END_LIMIT_S)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(freezable)], check=True)
        assert run.left_after(60.0) == []
    assert status == 0, run.log[-6000:]
    assert sorted(run.metrics) == [5, 6, 7]
    assert f"{freezable}/step_000005.parquet" in run.log
    assert "not written yet after 30 s" in run.log
    assert last_saved(disks) == 7
