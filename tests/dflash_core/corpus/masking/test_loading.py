"""Tokenizer folders."""

import json
from pathlib import Path

import pytest

from dflash_core.corpus.masking.loading import load_tokenizer
from tests.tiny import tiny_target


@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizers_own_code_runs_only_where_it_is_trusted(tmp_path: Path, trusted: bool) -> None:
    tiny_target(tmp_path)
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    file = tmp_path / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    tokenizer = load_tokenizer(tmp_path, trust_remote_code=trusted)
    assert (type(tokenizer).__name__ == "OwnTokenizer") == trusted
