"""A GGUF file as a transformers folder: checked, made whole again from its blocks, written once."""

import hashlib
import importlib.util
import struct
from pathlib import Path
from typing import Any

import torch

from dflash_core.artifacts import read_manifest
from dflash_core.errors import ArtifactError, TargetError
from dflash_core.target.folder import write_folder

__all__ = ["convert_gguf", "find_gguf"]

KIND = "converted-target"
VERSION = 1
NEEDED = ("gguf", "accelerate")


def find_gguf(name: str) -> Path:
    """Return the file of a path, or of ``package:file`` for one that an installed package holds.

    The package is looked up, not imported.

    Raises:
        TargetError: There is no such file or package.
    """
    package, _, inner = name.partition(":")
    path = Path(name)
    if inner and not path.exists():
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise TargetError(f"no package '{package}' is installed; install it to read {inner}")
        path = Path(spec.submodule_search_locations[0]) / inner
    if not path.is_file():
        raise TargetError(f"there is no GGUF file {path}; give an existing one")
    return path


def convert_gguf(
    file: Path, out: Path, *, sha256: str | None = None, num_bytes: int | None = None
) -> Path:
    """Write a GGUF file's model and tokenizer as a transformers folder in float32.

    The weights are the file's quantised ones made whole again, not those they were quantised from.
    A folder that an earlier call made of the same bytes is returned as it is.

    Args:
        file: The GGUF file.
        out: Folder to write, whole or not at all.
        sha256: What the file must hash to; not checked when not given.
        num_bytes: How long the file must be; not checked when not given.

    Raises:
        TargetError: The file is another one, or what reads it is not installed.
        ArtifactError: ``out`` holds something else.
    """
    found = file.stat().st_size
    if num_bytes is not None and found != num_bytes:
        raise TargetError(f"{file} has {found:,} bytes, expected are {num_bytes:,}; fetch it again")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 is not None and digest != sha256:
        raise TargetError(f"{file} has SHA-256 {digest}, expected is {sha256}; fetch it again")
    if out.exists():
        manifest = read_manifest(out, kind=KIND, format_version=VERSION)
        if manifest.metadata["sha256"] != digest:
            raise ArtifactError(f"{out} was made of another GGUF file; remove it, or set --out")
        return out
    for library in NEEDED:
        if importlib.util.find_spec(library) is None:
            raise TargetError(
                f"reading {file.name} needs the library '{library}', which is not installed; "
                "install this project's extra 'gguf'"
            )
    try:
        model, tokenizer = _load(file)
    except (ValueError, LookupError, struct.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TargetError(
            f"{file} cannot be read as GGUF: {reason.rstrip('.')}; fetch it again, or give a file "
            "of an architecture that transformers reads"
        ) from error
    facts = {"file": file.name, "sha256": digest}
    return write_folder(model, tokenizer, out, kind=KIND, format_version=VERSION, facts=facts)


def _load(file: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        # Without it the layers stay packed, and cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
