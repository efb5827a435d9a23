"""A model and its tokenizer as a transformers folder, whole or not at all."""

from pathlib import Path
from typing import Any

from dflash_core.artifacts import new_artifact

__all__ = ["write_folder"]


def write_folder(
    model: Any, tokenizer: Any, out: Path, *, kind: str, format_version: int, facts: dict[str, Any]
) -> Path:
    """Save model and tokenizer for transformers, readable by everyone.

    Args:
        model: A transformers model.
        tokenizer: Its tokenizer.
        out: Folder.
        kind: What the manifest says the folder is.
        format_version: Its version.
        facts: JSON-able facts for the manifest.
    """
    with new_artifact(out, kind=kind, format_version=format_version, metadata=facts) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in scratch.iterdir():
            file.chmod(0o644)
    return out
