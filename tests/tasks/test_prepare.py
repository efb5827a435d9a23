"""The corpus of a flow: answers are made once, and a slot is held while they are, no longer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from configs.settings import Settings
from dflash_core.corpus.build import CorpusReport
from dflash_core.errors import DataError
from tasks.places.run_folder import open_run_folder
from tasks.prepare import prepare_corpus
from tests.tiny import TINY_LAYER_IDS, tiny_target


@pytest.mark.usefixtures("prefect_server")
def test_answers_are_made_once_while_a_slot_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextmanager
    def decoding_device(settings: Settings) -> Iterator[torch.device]:
        seen.append("slot taken")
        yield torch.device("cpu")
        stores = list(settings.run.root.glob("cache/corpus-*/*"))
        seen.append("given back behind tokenising" if stores else "slot given back")

    monkeypatch.setattr("tasks.prepare.decoding_device", decoding_device)
    target, chats = tiny_target(tmp_path / "target"), tmp_path / "chats.jsonl"
    rows = [{"question": f"question {k}", "answer": "a"} for k in range(12)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"odd": 1}]))

    def prepare(**corpus: float) -> CorpusReport:
        own = {"inputs": [chats], "regenerate": {"enabled": True, "max_new_tokens": 2}}
        settings = Settings.model_validate(
            {
                "run": {"root": tmp_path / "runs"},
                "target": {"path": target, "layer_ids": TINY_LAYER_IDS},
                "corpus": {**own, "held_out_percent": 50, **corpus},
            }
        )
        with open_run_folder(settings.run, default_name="run") as folder:
            return prepare_corpus.fn(settings, folder)

    with pytest.raises(DataError, match="1 of 13 rows were refused"):
        prepare()
    assert seen == []
    report = prepare(max_reject_share=0.5)
    assert seen == ["slot taken", "slot given back"]
    again = prepare(max_reject_share=0.6, max_length=300)
    assert seen == ["slot taken", "slot given back"], "answers were made anew"
    assert again.train != report.train and again.regenerated == report.regenerated
