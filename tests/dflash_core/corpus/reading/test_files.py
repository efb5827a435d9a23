"""Rows of every kind of file, and what is said of those that cannot be read."""

import bz2
import csv
import gzip
import json
import lzma
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from dflash_core.corpus.reading.files import file_hashes, find_files, iter_rows, parse_row, stem_of
from dflash_core.errors import DataError

ROWS = [{"text": f"row {k} \u2028 \x85 ü", "n": k} for k in range(5)]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()

PACKED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
REFUSED = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
    (b"\n<!DOCTYPE html><html></html>", "a web page"),
    (b"PK\x03\x04rest", "a ZIP archive"),
    (b"x" * 257 + b"ustar", "a tar archive"),
    ('{"n": 1}'.encode("utf-16"), "UTF-16"),
]


def values(path: Path) -> list:
    return [row.error or row.data for row in map(parse_row, iter_rows(path))]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", JSONL),
        ("lines in disguise.json", JSONL),
        ("bom.jsonl", b"\xef\xbb\xbf" + JSONL),
        ("crlf.jsonl", JSONL.replace(b"\n", b"\r\n")),
        ("blank lines.jsonl", b"\n\n" + JSONL.replace(b"\n", b"\n \n")),
        ("no last line end.jsonl", JSONL.rstrip()),
        ("array.json", json.dumps(ROWS).encode()),
        ("pretty array.json", json.dumps(ROWS, indent=2).encode()),
        ("bom array.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("a.jsonl.gz", gzip.compress(JSONL)),
        ("array.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode())),
        ("a.jsonl.zst", pa.compress(JSONL, codec="zstd", asbytes=True)),
    ],
)
def test_json_files_give_their_rows(tmp_path: Path, name: str, data: bytes) -> None:
    assert values(write(tmp_path / name, data)) == ROWS


def test_array_longer_than_a_block_is_streamed(tmp_path: Path) -> None:
    rows = [{"text": "x" * 700_000, "n": k} for k in range(5)] + [7, 12345]
    path = write(tmp_path / "big.json", json.dumps(rows, indent=1).encode())
    assert values(path) == rows


def test_zstandard_files_of_several_frames_are_read_to_the_end(tmp_path: Path) -> None:
    frames = [pa.compress(line, codec="zstd", asbytes=True) for line in JSONL.splitlines(True)]
    assert values(write(tmp_path / "a.jsonl.zst", b"".join(frames))) == ROWS


def test_document_is_one_row(tmp_path: Path) -> None:
    path = write(tmp_path / "run.traj", json.dumps({"history": ROWS}, indent=2).encode())
    assert values(path) == [{"history": ROWS}]


def test_lines_of_bare_lists_are_rows(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}]
    one = json.dumps(chat).encode() + b"\n"
    assert values(write(tmp_path / "two.jsonl", one * 2)) == [chat, chat]
    assert values(write(tmp_path / "one.jsonl", one)) == [chat]


def test_tables_give_their_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    with (tmp_path / "a.csv").open("w", newline="") as handle:
        writer = csv.DictWriter(handle, ["text", "n"])
        writer.writeheader()
        writer.writerows(ROWS)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert values(tmp_path / name) == ROWS
    assert values(tmp_path / "a.csv") == [{**row, "n": str(row["n"])} for row in ROWS]


def test_bad_lines_are_told_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = [b'{"n": 0}', b'{"n": 1', b'{"t": "\xff"}', b'{"t": "\0"}', b'{"n": 4}']
    found = [parse_row(row) for row in iter_rows(write(tmp_path / "a.jsonl", b"\n".join(lines)))]
    assert [row.number for row in found] == [1, 2, 3, 4, 5]
    assert (found[0].data, found[4].data) == ({"n": 0}, {"n": 4})
    assert "not valid JSON" in (found[1].error or "")
    assert found[2].error == "is not UTF-8: byte 0xff at 7"
    assert "not valid JSON" in (found[3].error or "")


def test_first_line_may_be_the_bad_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"n": 1\n{"n": 2}\n{"n": 3}\n')
    assert [row.error is None for row in map(parse_row, iter_rows(path))] == [False, True, True]


def test_broken_array_is_refused_behind_what_came_before(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'[{"n": 0},\n {"n": 1},\n {"n": oops},\n {"n": 3}]')
    rows = iter_rows(path)
    assert [next(rows).data, next(rows).data] == [{"n": 0}, {"n": 1}]
    with pytest.raises(DataError, match="after row 2: array is not valid JSON from its item 3 on"):
        next(rows)


@pytest.mark.parametrize("name", [*PACKED, "row.parquet"])
def test_cut_files_are_refused_however_much_can_be_read(tmp_path: Path, name: str) -> None:
    noise = "".join(json.dumps({"n": random.random()}) + "\n" for _ in range(4_000)).encode()
    data = PACKED[name](noise) if name in PACKED else b"PAR1" + noise
    with pytest.raises(DataError, match=r"cannot be read.*; get it anew or leave it out"):
        list(iter_rows(write(tmp_path / f"a.jsonl{name}", data[: len(data) // 2])))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.parquet", "a.bin"])
@pytest.mark.parametrize("pack", PACKED.values())
def test_files_are_read_for_what_they_hold_under_any_name(tmp_path: Path, name, pack) -> None:
    if name != "a.parquet":
        assert values(write(tmp_path / name, pack(JSONL))) == ROWS
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    assert values(write(tmp_path / name, pack(sink.getvalue().to_pybytes()))) == ROWS


@pytest.mark.parametrize(("head", "reason"), REFUSED)
def test_what_holds_no_rows_is_said_for_what_it_is(tmp_path: Path, head, reason) -> None:
    for name in ("a.jsonl", "a.parquet", "a.csv"):
        with pytest.raises(DataError, match=rf"{name} is {reason}"):
            list(iter_rows(write(tmp_path / name, head)))


@pytest.mark.parametrize("name", ["a.parquet", "a.pq", "a.arrow", "a.feather"])
def test_nulls_that_tables_fill_in_are_no_values(tmp_path: Path, name: str) -> None:
    rows = [{"x": [{"a": {"p": 1}}], "n": None}, {"x": [{"a": {"q": [None]}}], "n": 2}]
    table = pa.Table.from_pylist(rows)
    write_table = pq.write_table if name.startswith("a.p") else feather.write_feather
    write_table(table, str(tmp_path / name))
    assert values(tmp_path / name) == rows
    assert find_files([tmp_path])[0] == [tmp_path / name]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.json", b" \n\n", "is empty"),
        ("a.csv", b"", "is empty"),
        ("a.txt", b"", "is empty"),
        ("a.json", b"[]", "is empty"),
        ("a.csv", b"a,b\n1,2,3\n", "another number of fields"),
    ],
)
def test_files_of_no_rows_are_told(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    found = list(iter_rows(write(tmp_path / name, data)))
    assert len(found) == 1 and reason in (found[0].error or "")


def test_folders_and_globs_are_searched_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    names = ["b/z.jsonl", "b/a.json.gz", "c.parquet", "readme.md", ".hidden/x.jsonl"]
    for name in names:
        write(tmp_path / name, b"")
    expected = [tmp_path / name for name in ("c.parquet", "b/a.json.gz", "b/z.jsonl")]
    assert find_files([tmp_path])[0] == expected
    assert find_files([tmp_path / "b" / "*.jsonl"])[0] == [tmp_path / "b/z.jsonl"]
    assert find_files([tmp_path / "c.parquet", tmp_path])[0] == expected


def test_missing_inputs_are_refused(tmp_path: Path) -> None:
    for given in (tmp_path / "none.jsonl", tmp_path / "*.jsonl", tmp_path):
        with pytest.raises(DataError, match="names no chat file"):
            find_files([given])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for everyone, and a user who may not read everything: root steps down."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0)
        write(folder / "a.jsonl", JSONL)
        write(folder / "b.jsonl", JSONL).chmod(0)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65_534)
        yield folder
        if root:
            os.seteuid(0)
        (folder / "closed").chmod(0o700)


def test_what_may_not_be_read_is_told(open_folder: Path) -> None:
    files, refused = find_files([open_folder])
    assert files == [open_folder / "a.jsonl", open_folder / "b.jsonl"]
    assert refused == [(open_folder / "closed", "Permission denied")]
    assert values(files[0]) == ROWS
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        values(files[1])


def test_links_are_followed_once_and_broken_ones_are_told(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    chats = tmp_path / "chats"
    chats.mkdir()
    write(tmp_path / "far" / "a.jsonl", JSONL)
    (chats / "far").symlink_to(tmp_path / "far")
    (chats / "circle").symlink_to(chats)
    (chats / "b.jsonl").symlink_to(tmp_path / "none")
    files, refused = find_files([chats])
    assert files == [chats / "far" / "a.jsonl"]
    assert refused == [(chats / "b.jsonl", "a link to nothing")]


def test_what_preparation_wrote_is_no_chat(tmp_path: Path) -> None:
    names = ("a.jsonl", "s.rejects.jsonl", "s.regenerated.jsonl", "s/manifest.json", "s/x.arrow")
    (tmp_path / "s").mkdir()
    for name in names:
        write(tmp_path / name, JSONL)
    assert find_files([tmp_path])[0] == [tmp_path / "a.jsonl"]


def test_pipes_are_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(JSONL,))
    writer.start()
    assert values(find_files([pipe])[0][0]) == ROWS
    with pytest.raises(DataError, match=r"pipe is a pipe or the like.*write them to a file first"):
        file_hashes([pipe])
    writer.join()


def test_stem_leaves_suffixes_out() -> None:
    assert stem_of(Path("x/gsm8k__train.jsonl.gz")) == "gsm8k__train"
    assert stem_of(Path("v1.5.json")) == "v1.5"
