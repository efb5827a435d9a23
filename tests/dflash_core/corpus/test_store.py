"""The token store: opened in no time, checked on demand, never half-written."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.artifacts import Manifest
from dflash_core.corpus.store import Sample, TokenStore, write_store
from dflash_core.errors import ArtifactError, DataError

FOREIGN = Manifest(kind="drafter", format_version=1, content_hash="", files={}).model_dump_json()


def sample(length: int, name: str = "s", domain: str = "d") -> Sample:
    ids = np.arange(length, dtype=np.int32)
    return Sample(ids, ids % 3 == 0, domain, name)


def samples(count: int) -> list[Sample]:
    return [sample(k % 7 + 1, f"s{k}", f"d{k % 2}") for k in range(count)]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=20)
def test_samples_come_back_whatever_shards_and_batches(
    tmp_path_factory, count, shard_samples, batch_samples
) -> None:
    path = tmp_path_factory.mktemp("store") / "store"
    written = samples(count)
    store = write_store(
        path, written, shard_samples=shard_samples, batch_samples=min(batch_samples, shard_samples)
    )
    assert len(store) == count
    for before, after in zip(written, store, strict=True):
        assert np.array_equal(before.input_ids, after.input_ids)
        assert np.array_equal(before.loss_mask, after.loss_mask)
        assert (before.domain, before.sample_id) == (after.domain, after.sample_id)
    assert store.lengths.tolist() == [len(item.input_ids) for item in written]
    assert store.supervised.tolist() == [item.loss_mask.sum() for item in written]
    assert store.domains == [item.domain for item in written]


def test_many_shards_keep_their_order(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", samples(250), shard_samples=2, batch_samples=1)
    assert len(store.manifest.files) == 125
    assert store.sample_ids == [f"s{k}" for k in range(250)]
    assert store[249].sample_id == "s249"


def test_dtypes_are_those_of_the_contract(tmp_path: Path) -> None:
    item = write_store(tmp_path / "s", samples(3))[2]
    assert (item.input_ids.dtype, item.loss_mask.dtype) == (np.int32, np.bool_)


@given(st.lists(st.lists(st.integers(-2, 9), max_size=3), min_size=1), st.integers(1, 4))
@settings(max_examples=20)
def test_wrong_tokens_are_found_in_one_part_of_the_store(tmp_path_factory, texts, num_parts):
    made = [Sample(np.array(t, np.int32), np.ones(len(t), np.bool_), "d", "s") for t in texts]
    store = write_store(tmp_path_factory.mktemp("s") / "s", made, batch_samples=2)
    parts = [
        store.find_token(8, other=3, part=part, num_parts=num_parts) for part in range(num_parts)
    ]
    found = [part for part in parts if part is not None]
    wrong = [(k, t) for k, text in enumerate(texts) for t in text if t < 0 or t >= 8 or t == 3]
    assert set(found) <= set(wrong) and bool(found) == bool(wrong)


def test_empty_samples_are_kept(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [sample(0), sample(2)])
    assert store.lengths.tolist() == [0, 2] and len(store[0].input_ids) == 0


def test_rows_are_found_by_id(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", samples(9), shard_samples=4, batch_samples=2)
    assert store.indices(["s8", "none", "s0"]).tolist() == [8, -1, 0]


def test_rows_beyond_the_end_are_no_rows(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", samples(3))
    for index in (3, -1):
        with pytest.raises(IndexError, match="3 samples"):
            store[index]


def test_same_samples_have_the_same_hash(tmp_path: Path) -> None:
    one, two, other = (
        write_store(tmp_path / name, samples(count)).content_hash
        for name, count in (("a", 5), ("b", 5), ("c", 6))
    )
    assert one == two != other


def test_empty_corpus_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        write_store(tmp_path / "s", [])
    assert list(tmp_path.iterdir()) == []


def test_mask_of_another_length_is_refused(tmp_path: Path) -> None:
    bad = Sample(np.zeros(3, np.int32), np.zeros(2, np.bool_), "d", "x")
    with pytest.raises(DataError, match="sample x has 3 token ids but a loss mask of 2"):
        write_store(tmp_path / "s", [bad])


def test_failed_writer_keeps_the_store_that_was_there(tmp_path: Path) -> None:
    before = write_store(tmp_path / "s", samples(3)).content_hash

    def broken():
        yield sample(4)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_store(tmp_path / "s", broken())
    assert TokenStore.open(tmp_path / "s", verify=True).content_hash == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("manifest.json", "{}", "is no token store, so it is not replaced"),
        ("manifest.json", FOREIGN, "is no token store, so it is not replaced"),
        ("thesis/one.txt", "years of work", r"also holds thesis/one\.txt, which is no part of"),
    ],
)
def test_only_a_store_and_nothing_else_is_replaced(tmp_path: Path, name, content, sentence) -> None:
    write_store(tmp_path / "s", samples(3))
    file = tmp_path / "s" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match=sentence):
        write_store(tmp_path / "s", samples(5))
    assert sorted(tmp_path.rglob("*")) == before and file.read_text() == content


def test_store_can_be_written_while_it_is_read(tmp_path: Path) -> None:
    old = write_store(tmp_path / "s", samples(3))
    write_store(tmp_path / "s", samples(5))
    assert old[2].sample_id == "s2"
    assert len(TokenStore.open(tmp_path / "s")) == 5


@pytest.mark.parametrize("name", ["manifest.json", "shard-00001.arrow"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_store(tmp_path / "s", samples(4), shard_samples=2, batch_samples=2)
    (tmp_path / "s" / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        TokenStore.open(tmp_path / "s")


def test_cut_shard_is_named(tmp_path: Path) -> None:
    write_store(tmp_path / "s", samples(4))
    shard = tmp_path / "s" / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match=r"shard-00000.arrow is .* bytes but its manifest"):
        TokenStore.open(tmp_path / "s")


def test_changed_byte_is_found_when_asked(tmp_path: Path) -> None:
    write_store(tmp_path / "s", samples(4))
    shard = tmp_path / "s" / "shard-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactError, match="content differs from its manifest"):
        TokenStore.open(tmp_path / "s", verify=True)


def test_other_folders_are_no_stores(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is no token store"):
        TokenStore.open(tmp_path)


def test_opening_reads_no_tokens(tmp_path: Path) -> None:
    """A store of 20 MB is mapped, not read: Arrow allocates next to nothing for it."""
    written = write_store(tmp_path / "s", (sample(100_000, str(k)) for k in range(50)))
    assert sum(entry.num_bytes for entry in written.manifest.files.values()) > 20_000_000
    before = pa.total_allocated_bytes()
    store = TokenStore.open(tmp_path / "s")
    assert store.lengths.sum() == 5_000_000
    assert pa.total_allocated_bytes() - before < 100_000


def test_stores_can_be_moved(tmp_path: Path) -> None:
    before = write_store(tmp_path / "s", samples(3))
    shutil.move(tmp_path / "s", tmp_path / "t")
    assert TokenStore.open(tmp_path / "t", verify=True).content_hash == before.content_hash


def test_a_length_that_is_not_that_of_the_ids_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s", samples(3))
    (shard,) = (tmp_path / "s").glob("shard-*")
    table = pa.ipc.open_file(shard).read_all()
    column = table.schema.get_field_index("length")
    table = table.set_column(column, table.field(column), pa.array([1, 900, 3], pa.int32()))
    with pa.ipc.new_file(shard, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ArtifactError, match=r"says 900 under 'length' of sample 1, which has 2"):
        TokenStore.open(tmp_path / "s")
