"""Inputs in object storage, played by fsspec's memory file system."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from prefect.states import Failed

from configs.settings import RunConfig, load_settings
from dflash_core.corpus.config import CorpusConfig
from dflash_core.errors import ConfigError, DataError, TimeLimitError
from tasks.places.remote import is_remote, may_pass, with_local_inputs
from tasks.places.run_folder import RunFolder, open_run_folder


@pytest.fixture
def storage() -> Iterator[fsspec.AbstractFileSystem]:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/bucket/chats/a.jsonl": b"one\n", "/bucket/chats/deep/b.jsonl": b"two\n"})
    yield memory
    memory.rm("/bucket", recursive=True)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with open_run_folder(RunConfig(root=tmp_path), default_name="run") as opened:
        yield opened


def local(folder: RunFolder, *inputs: str) -> tuple[Path, ...]:
    config = CorpusConfig(inputs=tuple(map(Path, inputs)))
    return with_local_inputs.fn(config, folder).inputs


@pytest.mark.usefixtures("storage")
def test_objects_and_folders_become_files_here(folder: RunFolder, tmp_path: Path) -> None:
    one, tree, own = local(
        folder, "memory://bucket/chats/a.jsonl", "memory://bucket/chats", str(tmp_path)
    )
    assert one.name == "a.jsonl" and one.read_text() == "one\n"
    assert [(p.name, p.read_text()) for p in sorted(tree.rglob("*.jsonl"))] == [
        ("a.jsonl", "one\n"),
        ("b.jsonl", "two\n"),
    ]
    assert own == tmp_path


def test_an_object_is_fetched_again_only_when_it_has_changed(
    folder: RunFolder, storage: fsspec.AbstractFileSystem
) -> None:
    (first,) = local(folder, "memory://bucket/chats/a.jsonl")
    fetched_at = first.stat().st_mtime_ns
    assert local(folder, "memory://bucket/chats/a.jsonl") == (first,)
    assert first.stat().st_mtime_ns == fetched_at
    storage.pipe("/bucket/chats/a.jsonl", b"changed\n")
    (second,) = local(folder, "memory://bucket/chats/a.jsonl")
    assert second != first and second.read_text() == "changed\n"


@pytest.mark.usefixtures("storage")
def test_what_is_not_there_and_what_cannot_be_opened_are_one_sentence(folder: RunFolder) -> None:
    with pytest.raises(DataError, match="memory://bucket/none"):
        local(folder, "memory://bucket/none")
    with pytest.raises(ConfigError, match="ftq://bucket/x, which cannot be opened"):
        local(folder, "ftq://bucket/x")


@pytest.mark.usefixtures("storage")
def test_an_object_is_not_written_outside_the_cache(folder: RunFolder, tmp_path: Path) -> None:
    objects = MemoryFileSystem.store
    objects["/bucket/chats/../../planted.jsonl"] = objects["/bucket/chats/a.jsonl"]
    with pytest.raises(DataError, match=r"planted.jsonl at memory://bucket/chats has '..' in its"):
        local(folder, "memory://bucket/chats")
    assert not list(tmp_path.rglob("planted.jsonl"))
    del objects["/bucket/chats/../../planted.jsonl"]


@pytest.mark.parametrize(
    ("cause", "again"),
    [(ConnectionError("away"), True), (FileNotFoundError("x"), False), (ValueError("x"), False)],
)
def test_only_an_outage_is_tried_again(cause: Exception, again: bool) -> None:
    error = DataError("cannot be read")
    error.__cause__ = cause
    assert may_pass(None, None, Failed(data=error)) is again


class Deaf(MemoryFileSystem):
    """Lists objects and never sends one until it is released."""

    protocol = "deaf"
    released = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("deaf:/"))

    def get_file(self, *arguments: Any, **more: Any) -> None:
        self.released.wait(60)


class Slow(MemoryFileSystem):
    """Sends an object in two halves, and the second only when two fetches have the first."""

    protocol = "slow"
    both = threading.Barrier(2)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("slow:/"))

    def get_file(self, *arguments: Any, **more: Any) -> None:
        with Path(arguments[1]).open("wb") as file:
            for half in (b"one", b"\n"):
                file.write(half)
                file.flush()
                self.both.wait(60)


@pytest.mark.usefixtures("storage")
def test_two_runs_that_fetch_one_object_both_get_it_whole(tmp_path: Path) -> None:
    fsspec.register_implementation("slow", Slow, clobber=True)

    def fetch(name: str) -> bytes:
        with open_run_folder(RunConfig(root=tmp_path), default_name=name) as folder:
            return local(folder, "slow://bucket/chats/a.jsonl")[0].read_bytes()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fetch, ["first", "second"])) == [b"one\n"] * 2
    assert [file.name for file in tmp_path.glob("cache/*/*")] == ["a.jsonl"], "nothing is left over"


@pytest.mark.usefixtures("storage")
def test_a_storage_that_stops_answering_is_left(tmp_path: Path) -> None:
    fsspec.register_implementation("deaf", Deaf, clobber=True)
    config = RunConfig(root=tmp_path, fetch_limit_s=0.2)
    sentence = r"a\.jsonl did not arrive within 0.2 s \(run.fetch_limit_s\)"
    with open_run_folder(config, default_name="run") as folder:
        try:
            with pytest.raises(TimeLimitError, match=sentence):
                local(folder, "deaf://bucket/chats/a.jsonl")
        finally:
            Deaf.released.set()


def test_an_address_in_a_settings_file_is_no_path_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[target]\npath = "model"\n[corpus]\ninputs = ["s3://bucket/chats.jsonl", "own.jsonl"]\n'
    )
    remote, own = load_settings(file).corpus.inputs
    assert is_remote(remote) and not is_remote(own)
    assert own == tmp_path / "own.jsonl"
