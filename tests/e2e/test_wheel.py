"""The wheel, built and installed in an environment of its own: what a user has who does not clone the repository."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from input_cases import write_model, write_rows

from verl_tree.records import StoredLeaf, StoredTree, write_trees

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what git would commit, so that nothing left over in the working tree helps."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    kept = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(kept, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    packed = ["tar", "--create", "--null", "--files-from=-"]
    archive = subprocess.run(packed, cwd=ROOT, check=True, capture_output=True, input=files.encode()).stdout
    subprocess.run(["tar", "--extract"], cwd=source, check=True, input=archive)
    options = ["--no-deps", "--no-build-isolation", "--no-index", f"--wheel-dir={folder}"]
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that holds the wheel; other packages are those of the tests' environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # A path in a .pth file is searched, but its own .pth files are not read: those would lead to the working tree.
    others = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    (folder / "lib" / version / "site-packages" / "others.pth").write_text("\n".join(sorted(others)))
    return python


def run(program: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(
        [str(program), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_has_the_packages_and_their_files(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"verl_tree", "rollout_hooks"}
    modules = {file for top in ("verl_tree", "rollout_hooks") for file in (ROOT / top).rglob("*.py")}
    configs = {ROOT / "verl_tree" / file.relative_to(ROOT) for file in (ROOT / "configs").rglob("*.*")}
    page = set((ROOT / "verl_tree" / "records" / "page").glob("*.*"))
    tables = set((ROOT / "verl_tree").rglob("*.csv"))
    typed = {ROOT / top / "py.typed" for top in ("verl_tree", "rollout_hooks")}
    files = {file for file in modules | configs | page | typed | tables if "__pycache__" not in file.parts}
    assert {file.suffix for file in files} >= {".py", ".yaml", ".html", ".css", ".js", ".csv"}
    assert names == {str(file.relative_to(ROOT)) for file in files}


def test_the_installed_command_checks_a_configuration(python: Path, tmp_path: Path) -> None:
    rows, model = write_rows(tmp_path / "rows.parquet"), write_model(tmp_path / "model")
    files = [f"data.train_files={rows}", f"data.val_files={rows}", f"actor_rollout_ref.model.path={model}"]
    done = run(python.with_name("verl-tree"), "check", "profile=cpu", *files, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The command can run" in done.stdout


def test_the_installed_command_shows_a_tree(python: Path, tmp_path: Path) -> None:
    tokens = np.array([1, 2, 3])
    leaf = StoredLeaf(0, 0, tokens, 1, is_trained=tokens > 1, log_probs=np.full(3, np.nan))
    write_trees(tmp_path / "step_000001.parquet", [StoredTree(step=1, uid="u", leaves=(leaf,))])
    command = python.with_name("verl-tree")
    done = run(command, "show", "step_000001.parquet", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "step_000001_u.html\n"), done.stderr
    assert "<!DOCTYPE html>" in (tmp_path / "step_000001_u.html").read_text()
    assert "try-agent" in run(command, "--help", folder=tmp_path).stdout


def test_the_installed_trainer_knows_its_options(python: Path, tmp_path: Path) -> None:
    for profile in ("cpu", "gpu"):
        shown = ("--cfg=job", "--package=tree", f"profile={profile}", "tree.capacity=4321")
        done = run(python, "-m", "verl_tree.main_ppo", *shown, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "capacity: 4321" in done.stdout
    where = run(python, "-c", "import verl_tree; print(verl_tree.__file__)", folder=tmp_path)
    assert where.stdout.startswith(str(python.parents[1])), "the working tree was tested instead of the wheel"
