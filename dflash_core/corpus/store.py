"""The token store: tokenised samples in Arrow IPC shards, memory-mapped.

A store is an artifact directory with ``shard-00000.arrow`` ... and columns ``input_ids``
``list<int32>``, ``loss_mask`` ``list<bool>``, ``length`` ``int32``, ``supervised`` ``int32``,
``domain`` ``str``, ``sample_id`` ``str``. Opening it maps the files; lengths are read from their
own column, never by reading tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dflash_core.artifacts import Manifest, new_artifact, read_manifest, verify_artifact
from dflash_core.errors import ArtifactError, DataError

__all__ = [
    "SCHEMA",
    "STORE_KIND",
    "STORE_VERSION",
    "Sample",
    "ShardWriter",
    "TokenStore",
    "record_batch",
    "write_store",
]

STORE_KIND = "token store"
STORE_VERSION = 1
SHARD_PREFIX = "shard-"
# Offsets within a record batch are 32-bit, and a batch is held in memory.
BATCH_TOKENS = 1 << 24

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("length", pa.int32()),
        ("supervised", pa.int32()),
        ("domain", pa.string()),
        ("sample_id", pa.string()),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation.

    Attributes:
        input_ids: Token ids, int32, shape ``(length,)``.
        loss_mask: True where the token is supervised, shape ``(length,)``.
        domain: Where it came from.
        sample_id: Stable identity, the seed of its anchors.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    domain: str
    sample_id: str


class TokenStore:
    """A token store opened for reading; ranks of one machine share the page cache."""

    def __init__(self, path: Path, manifest: Manifest, table: pa.Table) -> None:
        self.path = path
        self.manifest = manifest
        self._table = table
        chunks = table.column("length").chunks
        self._starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])

    @classmethod
    def open(cls, path: Path, *, verify: bool = False) -> "TokenStore":
        """Open a store.

        Args:
            path: Store directory.
            verify: Also read every shard and compare its hash with the manifest.

        Raises:
            ArtifactError: Missing, damaged, of another format version, or its lengths are not
                those of its ids.
        """
        path = Path(path)
        manifest = read_manifest(path, kind=STORE_KIND, format_version=STORE_VERSION)
        if verify:
            verify_artifact(path, manifest)
        tables = []
        for name in sorted(name for name in manifest.files if name.startswith(SHARD_PREFIX)):
            try:
                source = pa.memory_map(str(path / name))
                tables.append(pa.ipc.open_file(source).read_all())
            except pa.ArrowInvalid as error:
                raise ArtifactError(f"{path / name} is damaged: {error}") from None
            if tables[-1].schema != SCHEMA:
                raise ArtifactError(f"{path / name} has other columns than a {STORE_KIND}")
            _check_lengths(tables[-1], path / name)
        return cls(path, manifest, pa.concat_tables(tables) if tables else SCHEMA.empty_table())

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a store with {len(self)} samples")
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[chunk])
        return Sample(
            input_ids=self._column("input_ids", chunk)[row].values.to_numpy(),
            loss_mask=self._column("loss_mask", chunk)[row].values.to_numpy(zero_copy_only=False),
            domain=self._column("domain", chunk)[row].as_py(),
            sample_id=self._column("sample_id", chunk)[row].as_py(),
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @property
    def content_hash(self) -> str:
        """Hash of the samples, from the manifest."""
        return self.manifest.content_hash

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Sequence lengths in tokens, shape ``(num_samples,)``."""
        return self._table.column("length").to_numpy().astype(np.int64)

    @property
    def supervised(self) -> NDArray[np.int64]:
        """Supervised tokens of each sample, shape ``(num_samples,)``."""
        return self._table.column("supervised").to_numpy().astype(np.int64)

    @property
    def domains(self) -> list[str]:
        """Domain of each sample."""
        return self._table.column("domain").to_pylist()

    @property
    def sample_ids(self) -> list[str]:
        """Identity of each sample."""
        return self._table.column("sample_id").to_pylist()

    def supervised_token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often each token is supervised, shape ``(vocab_size,)``; reads all tokens."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        chunks = (self._table.column(name).chunks for name in ("input_ids", "loss_mask"))
        for ids, mask in zip(*chunks, strict=True):
            supervised = mask.flatten().to_numpy(zero_copy_only=False)
            counts += np.bincount(ids.flatten().to_numpy()[supervised], minlength=vocab_size)
        return counts

    def find_token(
        self, limit: int, *, other: int | None = None, part: int = 0, num_parts: int = 1
    ) -> tuple[int, int] | None:
        """Return a sample that holds a wrong token, and that token; None without one.

        Reads all tokens of this part.

        Args:
            limit: Ids from here on are wrong, as negative ones are.
            other: One more wrong id.
            part: Which part of the store to look through.
            num_parts: Parts in all.
        """
        chunks = self._table.column("input_ids").chunks
        for number in range(part, len(chunks), num_parts):
            ids = chunks[number].flatten().to_numpy()
            wrong = ids.view(np.uint32) >= limit  # negative ids are the largest
            if other is not None:
                wrong |= ids == other
            if wrong.any():
                place = int(wrong.argmax())
                ends = np.cumsum(chunks[number].value_lengths().to_numpy())
                row = int(np.searchsorted(ends, place, side="right"))
                return int(self._starts[number]) + row, int(ids[place])
        return None

    def indices(self, sample_ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the rows of the given sample ids, -1 where absent."""
        wanted = pa.array(sample_ids, pa.string())
        found = pc.call_function(
            "index_in", [wanted], pc.SetLookupOptions(self._table.column("sample_id"))
        )
        return found.fill_null(-1).to_numpy().astype(np.int64)

    def _column(self, name: str, chunk: int) -> Any:
        return self._table.column(name).chunk(chunk)


def write_store(
    path: Path,
    samples: Iterable[Sample],
    *,
    metadata: dict[str, Any] | None = None,
    shard_samples: int = 65_536,
    batch_samples: int = 1_024,
) -> TokenStore:
    """Write samples to a new store and open it.

    Args:
        path: Store directory; replaced as a whole once everything is written.
        samples: The samples, consumed as a stream.
        metadata: JSON-able facts for the manifest (tokenizer, template, source).
        shard_samples: Samples of one shard file.
        batch_samples: Samples held in memory at a time.

    Raises:
        DataError: There is no sample, or ids and mask of a sample differ in length.
    """
    facts = dict(metadata or {})
    with new_artifact(path, kind=STORE_KIND, format_version=STORE_VERSION, metadata=facts) as out:
        with ShardWriter(out, shard_samples=shard_samples) as shards:
            for batch in _record_batches(samples, batch_samples):
                shards.write(batch)
        if shards.num_samples == 0:
            raise DataError(f"the corpus for {path} is empty: no sample was left to store")
        facts["num_samples"] = shards.num_samples
    return TokenStore.open(path)


class ShardWriter:
    """Writes record batches to numbered shard files of a folder, as a context manager.

    Args:
        folder: Where the shards go, usually the scratch folder of a new artifact.
        shard_samples: A shard is full once it holds this many samples.
    """

    def __init__(self, folder: Path, *, shard_samples: int = 65_536) -> None:
        self.num_samples = 0
        self._folder = folder
        self._shard_samples = shard_samples
        self._writer: pa.RecordBatchFileWriter | None = None
        self._num_shards = self._in_shard = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch with the store's columns."""
        if self._writer is None or self._in_shard >= self._shard_samples:
            self._writer = self._next_shard()
        self._writer.write_batch(batch)
        self._in_shard += batch.num_rows
        self.num_samples += batch.num_rows

    def _next_shard(self) -> pa.RecordBatchFileWriter:
        if self._writer is not None:
            self._writer.close()
        file = self._folder / f"{SHARD_PREFIX}{self._num_shards:05d}.arrow"
        self._num_shards += 1
        self._in_shard = 0
        return pa.ipc.new_file(file, SCHEMA)


def _record_batches(samples: Iterable[Sample], size: int) -> Iterator[pa.RecordBatch]:
    rows: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        if sample.input_ids.shape != sample.loss_mask.shape:
            raise DataError(
                f"sample {sample.sample_id} has {len(sample.input_ids)} token ids but a loss mask "
                f"of {len(sample.loss_mask)}"
            )
        rows.append(sample)
        num_tokens += len(sample.input_ids)
        if len(rows) == size or num_tokens >= BATCH_TOKENS:
            yield record_batch(rows)
            rows, num_tokens = [], 0
    if rows:
        yield record_batch(rows)


def record_batch(rows: Sequence[Sample]) -> pa.RecordBatch:
    """Return samples as a record batch with the store's columns."""
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int32)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = np.concatenate([row.input_ids for row in rows]).astype(np.int32)
    mask = np.concatenate([row.loss_mask for row in rows]).astype(np.bool_)
    supervised = np.array([int(np.count_nonzero(row.loss_mask)) for row in rows], dtype=np.int32)
    return pa.record_batch(
        [
            pa.ListArray.from_arrays(offsets, pa.array(ids)),
            pa.ListArray.from_arrays(offsets, pa.array(mask)),
            pa.array(lengths),
            pa.array(supervised),
            pa.array([row.domain for row in rows], pa.string()),
            pa.array([row.sample_id for row in rows], pa.string()),
        ],
        schema=SCHEMA,
    )


def _check_lengths(table: pa.Table, shard: Path) -> None:
    """Refuse a shard whose plans would be made for other lengths; reads offsets, not tokens."""
    held = pc.call_function("list_value_length", [table["input_ids"]]).to_numpy()
    said = table["length"].to_numpy()
    if len(wrong := np.flatnonzero(held != said)):
        first = int(wrong[0])
        raise ArtifactError(
            f"{shard} says {said[first]:,} under 'length' of sample {first}, which has "
            f"{held[first]:,} token ids ({len(wrong):,} such samples); prepare it again"
        )
