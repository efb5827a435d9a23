"""What two runs would make at the same time is made by one of them."""

import threading
from pathlib import Path

import pytest

from configs.settings import RunConfig
from tasks.places.keys import alone
from tasks.places.run_folder import open_run_folder


def test_a_second_maker_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    waiting, made = threading.Event(), threading.Event()

    def announce(text: str) -> None:
        said.append(text)
        waiting.set()

    monkeypatch.setattr("tasks.places.keys.announce", announce)
    with open_run_folder(RunConfig(root=tmp_path), default_name="run") as folder:

        def second() -> None:
            with alone(folder, "corpus-1"):
                made.set()

        with alone(folder, "corpus-1"):
            thread = threading.Thread(target=second)
            thread.start()
            assert waiting.wait(60)
            assert not made.is_set()
        thread.join(60)
        assert made.is_set()
        with alone(folder, "corpus-1"), alone(folder, "corpus-2"):
            assert said == ["waiting for another run that makes corpus-1"]
