"""What a flow run tells other machines, over several attempts of it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prefect import flow
from prefect.runtime import flow_run

from configs.settings import RunConfig
from dflash_core.errors import TrainingError
from tasks.launching.launch import Launch
from tasks.launching.machines import Machines, _end_of, follow
from tasks.places.run_folder import open_run_folder

LAUNCH = Launch(module="no_such_module", arguments=(), num_ranks=2)


@pytest.fixture
def ours(tmp_path: Path) -> Machines:
    return Machines(2, "127.0.0.1:29400", tmp_path / "some-run")


def joined(machines: Machines, *, patience_s: float) -> int:
    return follow(machines.folder, patience_s=patience_s, on_line=[].append)


def test_a_launch_that_is_over_is_started_by_nobody(ours: Machines) -> None:
    ours.announce(LAUNCH)
    ours.over()
    with pytest.raises(TrainingError, match=r"nothing was announced .* for 0 s"):
        joined(ours, patience_s=0)
    ours.dismiss()
    assert joined(ours, patience_s=0) == 0


def test_launches_of_two_attempts_never_meet(ours: Machines) -> None:
    first = ours.announce(LAUNCH)
    ours.begin()
    assert ours.announce(LAUNCH).key != first.key


def test_the_end_of_an_earlier_attempt_sends_nobody_home(
    ours: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    def end_of(folder: Path) -> int | None:
        found = _end_of(folder)
        looked.set()
        return found

    monkeypatch.setattr("tasks.launching.machines._end_of", end_of)
    ours.dismiss()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(joined, ours, patience_s=120)
        assert looked.wait(60)
        with pytest.raises(TimeoutError):
            other.result(0.2)
        ours.begin()
        ours.dismiss()
        assert other.result(60) == 0


def test_a_flow_that_opens_its_folder_begins_anew(tmp_path: Path) -> None:
    config = RunConfig(root=tmp_path, nodes=2, rendezvous="127.0.0.1:29400")
    for _ in range(2):
        with open_run_folder(config, default_name="run") as folder:
            assert folder.machines is not None
            folder.machines.announce(LAUNCH)
            with pytest.raises(FileNotFoundError):
                (folder.machines.folder / "end").stat()


@pytest.mark.usefixtures("prefect_server")
def test_a_flow_within_a_flow_announces_where_the_others_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joiners know the flow run that was started: `retrain`'s, not `train_drafter`'s within it."""
    config = RunConfig(root=tmp_path, nodes=2, rendezvous="127.0.0.1:29400")

    @flow
    def inner() -> str:
        machines = Machines.of(config)
        assert machines is not None
        return machines.folder.name

    @flow
    def outer() -> tuple[str, str]:
        return str(flow_run.id), inner()

    started, announced = outer()
    assert announced == started
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "started-by-a-worker")
    assert inner() == "started-by-a-worker"
