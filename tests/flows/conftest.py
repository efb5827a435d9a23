"""A whole run that takes seconds: a tiny random target, a few real chats, two gloo ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.settings import Settings
from dflash_core.corpus.stdlib import functions_in
from tests.tiny import TINY_LAYER_IDS, tiny_target

MakeSettings = Callable[..., Settings]


@pytest.fixture(scope="session")
def tiny_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``target`` and ``chats.jsonl``."""
    import argparse
    import textwrap

    folder = tmp_path_factory.mktemp("tiny")
    tiny_target(folder / "target")
    rows = [
        {
            "id": function.sample_id,
            "messages": [
                {"role": "user", "content": function.prompt},
                {"role": "assistant", "content": function.source},
            ],
        }
        for module in (argparse, textwrap)
        for function in functions_in(Path(module.__file__).read_text(), module.__name__)
        if len(function.prompt) < 200
    ]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of all runs: they share corpus, profile and calibration, as real ones do."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def tiny_settings(tiny_parts: Path, runs: Path) -> MakeSettings:
    """Settings of the tiny run; sections given as mappings are laid over it."""

    def make(**sections: dict[str, object]) -> Settings:
        base: dict[str, dict[str, object]] = {
            "run": {"root": runs},
            "target": {"path": tiny_parts / "target", "layer_ids": TINY_LAYER_IDS},
            "corpus": {
                "source": "files",
                "inputs": [tiny_parts / "chats.jsonl"],
                "max_samples": 40,
                "max_length": 192,
                "held_out_percent": 20,
                "regenerate": {"enabled": True, "max_new_tokens": 12, "max_source_tokens": 60},
            },
            "batching": {
                "token_budget": 512,
                "micro_batches_per_step": 2,
                "num_buckets": 4,
                "pool_size": 16,
            },
            "compare": {"strategies": ["sorted", "random", "bucketed"]},
            "draft": {"num_layers": 1, "block_size": 4},
            "training": {"epochs": 1, "topology": {"num_ranks": 2}, "checkpoint_every_steps": 5},
            "evaluation": {"max_new_tokens": 12, "max_prompts": 3},
        }
        merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base}
        merged |= {name: value for name, value in sections.items() if name not in base}
        return Settings.model_validate(merged)

    return make
