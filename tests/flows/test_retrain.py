"""Champion and challenger: the first is crowned, nothing new is skipped, the worse one waits."""

import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from configs.settings import Settings
from flows.evaluate_drafter import evaluate_drafter
from flows.plan_batches import plan_batches
from flows.retrain import retrain
from tasks.places.run_folder import open_run_folder
from tasks.prepare import prepare_corpus
from tasks.promote import challenge, find_champion, is_news
from tests.flows.conftest import MakeSettings

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def settings(tiny_settings: MakeSettings, tiny_parts: Path, tmp_path: Path) -> Settings:
    chats = shutil.copy(tiny_parts / "chats.jsonl", tmp_path / "chats.jsonl")
    return tiny_settings(
        corpus={"inputs": [chats], "max_samples": None},
        compare={"strategies": ["bucketed"]},
        tracking={"model_name": "retrained"},
    )


def test_promote_then_skip_then_keep_the_champion(settings: Settings) -> None:
    first = retrain(settings, return_state=True)
    assert first.is_completed(), first.message
    assert first.result().startswith("version 1 is champion: the first drafter of this model, tau ")

    second = retrain(settings, return_state=True)
    assert (second.type.value, second.name) == ("COMPLETED", "Skipped")

    chats = settings.corpus.inputs[0]
    row = {
        "id": "new",
        "messages": [
            {"role": "user", "content": "def double(x):"},
            {"role": "assistant", "content": "def double(x):\n    return 2 * x"},
        ],
    }
    with chats.open("a") as file:
        file.write(json.dumps(row) + "\n")
    # A huge margin: whatever the new drafter gains, it is not enough.
    demanding = settings.retrain.model_copy(update={"min_gain": 3.0})
    third = retrain(settings.model_copy(update={"retrain": demanding}), return_state=True)
    assert third.is_completed(), third.message
    words = third.result()
    assert words.startswith("version 1 stays champion: tau ") and "margin 3" in words

    client = MlflowClient(f"sqlite:///{settings.run.root / 'mlflow' / 'mlflow.db'}")
    # MLflow's own type says str, its SQL store returns int.
    champion = client.get_model_version_by_alias("retrained", "champion")
    challenger = client.get_model_version_by_alias("retrained", "challenger")
    assert [int(version.version) for version in (champion, challenger)] == [1, 2]
    assert challenger.tags["challenger.reason"] == words

    fourth = retrain(settings, return_state=True)
    assert fourth.name == "Skipped", "what lost once is not trained again"

    assert evaluate_drafter(settings).tau >= 1
    planned = plan_batches(settings)
    assert planned.training is None and planned.gate.chosen == 0

    with open_run_folder(settings.run, default_name="late") as folder:
        words = challenge.fn(settings, folder, None, planned, folder.path)
        assert "became challenger meanwhile" in words, "another run's version isn't promoted for it"

        # Somebody tidies up in MLflow: the champion stays, nobody is challenger.
        client.delete_registered_model_alias("retrained", "challenger")
        words = challenge.fn(settings, folder, None, planned, folder.path)
        assert (
            words
            == f"somebody took the challenger's alias away meanwhile; {planned.name} is not judged"
        )
        serving = find_champion.fn(settings, folder)
        corpus = prepare_corpus(settings, folder)
        assert is_news.fn(settings, folder, serving, corpus.train), "lost once, but nobody knows"
