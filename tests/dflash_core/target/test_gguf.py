"""A GGUF file is taken only when it is the expected one, and converted once."""

from pathlib import Path

import pytest

from dflash_core.artifacts import new_artifact
from dflash_core.errors import ArtifactError, TargetError
from dflash_core.target import gguf
from dflash_core.target.gguf import convert_gguf, find_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_a_file_inside_an_installed_package_is_found() -> None:
    assert find_gguf("tests:tiny.py") == Path(__file__).resolve().parents[2] / "tiny.py"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_package:model.gguf", "no package 'no_such_package' is installed"),
        ("tests:absent.gguf", "there is no GGUF file .*absent.gguf"),
        ("absent.gguf", "there is no GGUF file absent.gguf"),
    ],
)
def test_what_is_not_there_is_named(name: str, sentence: str) -> None:
    with pytest.raises(TargetError, match=sentence):
        find_gguf(name)


@pytest.mark.parametrize(
    ("expected", "sentence"),
    [
        ({"num_bytes": 5}, "has 4 bytes, expected are 5"),
        ({"sha256": "ab"}, "has SHA-256 [0-9a-f]{64}, expected is ab"),
    ],
)
def test_another_file_than_expected_is_refused(file: Path, expected: dict, sentence: str) -> None:
    with pytest.raises(TargetError, match=sentence):
        convert_gguf(file, file.parent / "out", **expected)
    assert not (file.parent / "out").exists()


def test_a_folder_made_of_another_file_is_not_replaced(file: Path) -> None:
    out = file.parent / "out"
    with new_artifact(out, kind="converted-target", format_version=1, metadata={"sha256": "ab"}):
        pass
    with pytest.raises(ArtifactError, match="made of another GGUF file"):
        convert_gguf(file, out)


@pytest.mark.parametrize("content", [b"GGUF", b'{"messages": []}\n', b"GGUF\3" + bytes(40)])
def test_what_is_no_whole_gguf_file_is_refused(file: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    file.write_bytes(content)
    with pytest.raises(
        TargetError, match=r"model\.gguf cannot be read as GGUF: .*; fetch it again"
    ):
        convert_gguf(file, file.parent / "out")
    assert not (file.parent / "out").exists()


def test_what_was_converted_before_is_not_read_again(file: Path, monkeypatch) -> None:
    """Only the libraries' part is a stand-in: they are an extra."""

    class Saved:
        def save_pretrained(self, folder: Path) -> None:
            (folder / f"{type(self).__name__}.json").write_text("{}")

    reads: list[Path] = []

    def load(path: Path) -> tuple[Saved, Saved]:
        reads.append(path)
        return Saved(), Saved()

    monkeypatch.setattr(gguf, "_load", load)
    monkeypatch.setattr(gguf, "NEEDED", ())
    out = file.parent / "out"
    assert convert_gguf(file, out) == convert_gguf(file, out) == out
    assert reads == [file]
