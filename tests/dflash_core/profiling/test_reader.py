"""Token data on disk gives the profile that its samples give."""

import bz2
import gzip
import io
import json
import lzma
import random
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from dflash_core.corpus.store import Sample, write_store
from dflash_core.errors import DataError
from dflash_core.profiling import LengthProfile, TokenColumns, profile_data, read_lengths

ROWS = {
    "input_ids": [[1, 2], [], None, [1, 2, 3], [4, 5, 6]],
    "loss_mask": [[True, False], [], None, [True, True, False], [False, True, True]],
    "domain": ["a", "a", None, "b", "b"],
}


def write(path: Path, frame: pl.DataFrame) -> Path:
    getattr(
        frame, {".parquet": "write_parquet", ".arrow": "write_ipc"}.get(path.suffix, "write_ndjson")
    )(path)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl"])
def test_every_format_gives_the_same_profile(tmp_path, suffix):
    profile = profile_data([write(tmp_path / f"data{suffix}", pl.DataFrame(ROWS))])
    assert profile.lengths.tolist() == [2, 3]
    assert profile.counts.tolist() == [1, 2]
    assert profile.total_supervised == 5
    assert {name: part.counts for name, part in profile.domains.items()} == {"a": (1,), "b": (2,)}
    assert profile.bad == {"null": 1, "zero": 1, "negative": 0, "absurd": 0, "oversize": 0}
    assert profile.num_dropped == 2


def test_the_stream_format_of_saved_datasets_is_read_batch_by_batch(tmp_path):
    path = tmp_path / "data-00000-of-00001.arrow"
    table = pl.DataFrame(ROWS).to_arrow()
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    assert profile_data([path]) == profile_data([write(tmp_path / "b.parquet", pl.DataFrame(ROWS))])
    assert read_lengths(path)[0].tolist() == [2, 0, None, 3, 3]
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="is damaged"):
        profile_data([path])


def test_a_column_of_nothing_but_nulls_has_no_lengths(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"length": null}\n{"length": null}\n')
    assert profile_data([path]).bad["null"] == 2


def test_damage_inside_a_file_is_told_too(tmp_path):
    path = write(tmp_path / "data.parquet", pl.DataFrame({"length": range(1, 9_000)}))
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196  # the first page; the footer is whole
    path.write_bytes(data)
    with pytest.raises(DataError, match="is damaged"):
        profile_data([path])


def test_lists_of_fixed_size_are_lists_too(tmp_path):
    schema = {"input_ids": pl.Array(pl.Int32, 3), "loss_mask": pl.Array(pl.UInt8, 3)}
    frame = pl.DataFrame({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]}, schema=schema)
    profile = profile_data([write(tmp_path / "data.parquet", frame)])
    assert (profile.total_tokens, profile.total_supervised) == (3, 2)


def test_padding_is_no_token_and_labels_are_a_mask(tmp_path):
    rows = [
        {
            "input_ids": [0, 0, 5, 6, 7],
            "attention_mask": [0, 0, 1, 1, 1],
            "labels": [-100] * 4 + [7],
        },
        {"input_ids": [5, 6], "attention_mask": None, "labels": [-100, 6]},
    ]
    path = write(tmp_path / "data.parquet", pl.DataFrame(rows))
    assert profile_data([path]).lengths.tolist() == [2, 3]
    assert profile_data([path]).total_supervised == 2


def test_json_columns_that_appear_late_are_not_lost(tmp_path):
    path = tmp_path / "data.jsonl"
    early = [{"input_ids": []}] * 150
    late = [{"input_ids": [1, 2], "loss_mask": [0, 1], "domain": "code"}] * 2
    path.write_text("\n".join(map(json.dumps, early + late)))
    profile = profile_data([path])
    assert (profile.bad["zero"], profile.total_tokens, profile.total_supervised) == (150, 4, 2)
    assert list(profile.domains) == ["code"]


def test_truncation_counts_only_supervised_tokens_that_are_left(tmp_path):
    path = write(tmp_path / "data.parquet", pl.DataFrame(ROWS))
    profile = profile_data([path], max_length=2, oversize="truncate")
    assert (profile.total_tokens, profile.total_supervised, profile.num_truncated) == (6, 4, 2)


def test_a_folder_of_shards_equals_the_merge_of_its_files(tmp_path):
    frame = pl.DataFrame(ROWS)
    parts = [write(tmp_path / f"{i}.parquet", frame[i : i + 2]) for i in (0, 2, 4)]
    merged = profile_data(parts[:1])
    for part in parts[1:]:
        merged = merged.merge(profile_data([part]))
    assert merged == profile_data([tmp_path])


def test_a_token_store_is_read_by_its_length_column(tmp_path):
    rng = np.random.default_rng(0)
    samples = [
        Sample(np.zeros(n, np.int32), rng.random(n) < 0.5, "ab"[n % 2], f"s{n}")
        for n in (5, 2, 9, 4)
    ]
    store = write_store(tmp_path / "store", samples)
    profile = profile_data([store.path])
    assert profile == LengthProfile.from_lengths(store.lengths, store.supervised, store.domains)
    lengths, supervised = read_lengths(store.path)
    assert lengths.tolist() == [5, 2, 9, 4]
    assert supervised is not None
    assert supervised.tolist() == store.supervised.tolist()


def test_a_folder_of_datasets_and_stores_counts_each_sample_once(tmp_path):
    sample = Sample(np.zeros(4, np.int32), np.ones(4, np.bool_), "", "s")
    store = write_store(tmp_path / "both" / "store", [sample])
    write(store.path / "provenance.arrow", pl.DataFrame({"file": ["a.jsonl"]}))
    dataset = tmp_path / "both" / "x.parquet"
    dataset.mkdir()
    for number in range(2):
        write(dataset / f"part.{number}.parquet", pl.DataFrame({"length": [7, 9]}))
    assert profile_data([tmp_path / "both"]).counts.tolist() == [1, 2, 2]
    assert profile_data([dataset]).counts.tolist() == [2, 2]
    assert sorted(read_lengths(tmp_path / "both")[0].tolist()) == [4, 7, 7, 9, 9]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_a_length_column_is_held_against_the_ids(tmp_path, suffix):
    """A column of characters, or of lengths before a cut, is no measure of the tokens."""
    ids = [[1] * (1 + row % 3) for row in range(1_000)]
    lengths = [len(row) for row in ids]
    columns = {"input_ids": ids, "chars": [9 * n for n in lengths]}
    path = write(tmp_path / f"data.{suffix}", pl.DataFrame({**columns, "length": lengths}))
    assert read_lengths(path)[0].tolist() == lengths
    with pytest.raises(DataError, match=r"row 0 of .* has length 9 in column 'chars' but 1 ids"):
        read_lengths(path, columns=TokenColumns(length="chars"))
    late = [*lengths[:900], *(n + 1 for n in lengths[900:])]
    path = write(tmp_path / f"late.{suffix}", pl.DataFrame({**columns, "length": late}))
    with pytest.raises(DataError, match=r"row 900 of .*; name another column with --length"):
        profile_data([path])


def test_bad_numbers_in_a_length_column_are_counted(tmp_path):
    values = pl.Series("n", [3, 0, -7, None, 2**63 - 1, 2**63 + 5], dtype=pl.Int128)
    path = write(tmp_path / "data.parquet", pl.DataFrame([values]))
    profile = profile_data([path], columns=TokenColumns(length="n"))
    assert profile.bad == {"null": 1, "zero": 1, "negative": 1, "absurd": 2, "oversize": 0}
    path = write(
        tmp_path / "nan.parquet", pl.DataFrame({"length": [2.0, float("nan"), float("inf")]})
    )
    assert profile_data([path]).bad["null"] == 1
    assert profile_data([path]).bad["absurd"] == 1


def test_the_policy_error_names_the_finding(tmp_path):
    path = write(tmp_path / "data.parquet", pl.DataFrame({"length": [1, 9, 9]}))
    with pytest.raises(DataError, match="2 samples have 9 tokens but max_length is 5; raise it"):
        profile_data([path], max_length=5, oversize="error")
    path = write(tmp_path / "zero.parquet", pl.DataFrame({"length": [0]}))
    with pytest.raises(DataError, match="1 samples have 0 tokens but a usable length is 1 to"):
        profile_data([path], oversize="error")


def test_of_many_bad_lengths_the_policy_error_always_names_the_same(tmp_path):
    rows = [(domain, length) for domain in "cab" for length in (0, 7, *range(-1_000, -10))]
    frame = pl.DataFrame(rows, ["domain", "length"], orient="row")
    path = write(tmp_path / "data.parquet", frame)
    with pytest.raises(DataError, match="1 samples of domain 'a' have -1,000 tokens"):
        profile_data([path], oversize="error")


def test_unusable_files_are_refused_with_a_sentence(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "other.parquet", pl.DataFrame({"text": ["a"]}))
    write(tmp_path / "text.parquet", pl.DataFrame({"length": ["a"]}))
    write(tmp_path / "half.parquet", pl.DataFrame({"length": [1.5]}))
    write(tmp_path / "none.parquet", pl.DataFrame({"length": []}, schema={"length": pl.Int64}))
    (tmp_path / "broken.npy").write_bytes(b"no")
    (tmp_path / "empty.jsonl").write_text("")
    for name, words in {
        "broken.parquet": "is damaged",
        "notes.txt": "holds no token data",
        "empty": "holds no token data",
        "absent.parquet": "does not exist",
        "other.parquet": "neither a column 'length' nor lists in 'input_ids' but text",
        "text.parquet": "of type String",
        "half.parquet": "1 fractions",
        "none.parquet": "hold no samples",
        "empty.jsonl": "hold no samples",
    }.items():
        with pytest.raises(DataError, match=words):
            profile_data([tmp_path / name])
    with pytest.raises(DataError, match="holds no samples"):
        read_lengths(tmp_path / "empty.jsonl")
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("broken.npy", "empty.npy"):
        with pytest.raises(DataError, match=r"no \.npy file"):
            read_lengths(tmp_path / name)
    for text in ("{}", '{"bad": {}}', '{"domains": {}, "bad": {}}'):
        (tmp_path / "foreign.json").write_text(text)
        with pytest.raises(DataError, match="holds no saved profile"):
            profile_data([tmp_path / "foreign.json"])


def test_lengths_of_samples_come_in_order_with_missing_ones(tmp_path):
    path = write(tmp_path / "data.parquet", pl.DataFrame(ROWS))
    lengths, supervised = read_lengths(path)
    assert lengths.tolist() == [2, 0, None, 3, 3]
    assert supervised is None
    np.save(tmp_path / "lengths.npy", np.array([3, 1]))
    assert read_lengths(tmp_path / "lengths.npy")[0].tolist() == [3, 1]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "arrow"])
def test_a_name_with_brackets_is_no_pattern(tmp_path, suffix):
    folder = tmp_path / "d[en]"
    folder.mkdir()
    frame = pl.DataFrame({"length": [3, 5]})
    write = {"parquet": frame.write_parquet, "jsonl": frame.write_ndjson, "arrow": frame.write_ipc}
    write[suffix](folder / f"[a]*.{suffix}")
    assert profile_data([folder]).num_samples == 2


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "arrow", "csv", "tsv"])
def test_packed_files_and_tables_of_text_give_the_same_lengths(tmp_path, suffix, pack):
    frame = pl.DataFrame({"when": ["a", "b", "c"], "length": [3, 5, None]})
    made = io.BytesIO()
    write = {"parquet": frame.write_parquet, "jsonl": frame.write_ndjson, "arrow": frame.write_ipc}
    separator = "\t" if suffix == "tsv" else ","
    write.get(suffix, partial(frame.write_csv, separator=separator))(made)
    (tmp_path / f"data.{suffix}").write_bytes(pack(made.getvalue()))
    assert read_lengths(tmp_path / f"data.{suffix}")[0].tolist() == [3, 5, None]


def test_a_table_of_text_without_a_header_is_lengths_from_its_first_line(tmp_path):
    (tmp_path / "data.csv").write_text("300\n900\n")
    assert read_lengths(tmp_path / "data.csv")[0].tolist() == [300, 900]


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path):
    (tmp_path / "data.csv").write_text("When,ContextTokens,New\n1,300,4\n2,900,5\n")
    columns = TokenColumns(length="ContextTokens")
    assert read_lengths(tmp_path / "data.csv", columns=columns)[0].tolist() == [300, 900]
    for name, option in (("length", "--length-column"), ("mask", "--mask-column")):
        with pytest.raises(DataError, match=rf"no column 'Tokens' \({option}\) but When, Context"):
            read_lengths(tmp_path / "data.csv", columns=TokenColumns(**{name: "Tokens"}))


def test_what_holds_no_data_is_said_for_what_it_is(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    cut = gzip.compress(bytes(random.Random(0).randbytes(9_000)))[:5_000]
    heads = {"a pointer of Git LFS": pointer, "a web page": b"<html>", "damaged": cut}
    for words, head in heads.items():
        (tmp_path / "data.parquet").write_bytes(head)
        with pytest.raises(DataError, match=rf"data.parquet is {words}"):
            profile_data([tmp_path / "data.parquet"])
