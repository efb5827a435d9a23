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

__all__ = ["STORE_KIND", "STORE_VERSION", "Sample", "TokenStore", "write_store"]

STORE_KIND = "token store"
STORE_VERSION = 1

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
            ArtifactError: Missing, damaged, or of another format version.
        """
        path = Path(path)
        manifest = read_manifest(path, kind=STORE_KIND, format_version=STORE_VERSION)
        if verify:
            verify_artifact(path, manifest)
        tables = []
        for name in sorted(manifest.files):
            try:
                source = pa.memory_map(str(path / name))
                tables.append(pa.ipc.open_file(source).read_all())
            except pa.ArrowInvalid as error:
                raise ArtifactError(f"{path / name} is damaged: {error}") from None
            if tables[-1].schema != SCHEMA:
                raise ArtifactError(f"{path / name} has other columns than a {STORE_KIND}")
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

    def indices(self, sample_ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the rows of the given sample ids, -1 where absent."""
        found = pc.index_in(pa.array(sample_ids, pa.string()), self._table.column("sample_id"))
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
    count = num_shards = in_shard = 0
    with new_artifact(path, kind=STORE_KIND, format_version=STORE_VERSION, metadata=facts) as out:
        writer: pa.RecordBatchFileWriter | None = None
        try:
            for batch in _record_batches(samples, batch_samples):
                if writer is None or in_shard >= shard_samples:
                    if writer is not None:
                        writer.close()
                    writer = pa.ipc.new_file(out / f"shard-{num_shards:05d}.arrow", SCHEMA)
                    num_shards += 1
                    in_shard = 0
                writer.write_batch(batch)
                in_shard += batch.num_rows
                count += batch.num_rows
        finally:
            if writer is not None:
                writer.close()
        if count == 0:
            raise DataError(f"the corpus for {path} is empty: no sample was left to store")
        facts["num_samples"] = count
    return TokenStore.open(path)


def _record_batches(samples: Iterable[Sample], size: int) -> Iterator[pa.RecordBatch]:
    rows: list[Sample] = []
    for sample in samples:
        if sample.input_ids.shape != sample.loss_mask.shape:
            raise DataError(
                f"sample {sample.sample_id} has {len(sample.input_ids)} token ids but a loss mask "
                f"of {len(sample.loss_mask)}"
            )
        rows.append(sample)
        if len(rows) == size:
            yield _record_batch(rows)
            rows = []
    if rows:
        yield _record_batch(rows)


def _record_batch(rows: list[Sample]) -> pa.RecordBatch:
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
