"""Captured features on disk: one place for every sample, known from the lengths alone.

A cache belongs to one target, layer set, precision and token store: all of them are in its name, so
another one's is never read. Its data files are sparse and memory-mapped; a sample's place follows
from the lengths, so ranks need no index and no agreement. A table holds for each sample how many
tokens are there and their checksum: what is missing, torn or damaged does not match and counts as
absent.

Legend: M tokens, F features.
"""

import fcntl
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.artifacts import atomic_write, content_digest
from dflash_core.errors import ArtifactError, ConfigError
from dflash_core.training.config import CacheConfig

__all__ = ["FeatureCache", "cache_bytes", "make_room"]

SHARD_BYTES = 1 << 32
ENTRY = np.dtype([("tokens", "<u4"), ("checksum", "<u4")])  # tokens + 1, 0 = absent
DESCRIPTION_NAME = "cache.json"
TABLE_NAME = "table.bin"
LOCK_NAME = ".lock"
GIB = 1 << 30


class FeatureCache:
    """One open cache; any number of ranks may read and write it at a time.

    Args:
        folder: Its folder, made by `make_room`.
        lengths: Length of each sample, cut as the plan cuts it.
        num_features: Width of the features.
        dtype: Their type.
    """

    def __init__(
        self, folder: Path, lengths: NDArray[np.int64], *, num_features: int, dtype: torch.dtype
    ) -> None:
        self._folder = folder
        self._width = num_features
        self._dtype = dtype
        self._sizes = _sample_bytes(lengths, num_features, dtype)
        self._shards, self._starts = _places(self._sizes)
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_SH)  # while it is held, no other run drops this cache
        weakref.finalize(self, os.close, lock)
        table = folder / TABLE_NAME
        self._table: Any = _mapped(table, len(lengths) * ENTRY.itemsize, sparse=False).view(ENTRY)
        self._data: dict[int, tuple[int, Any]] = {}

    def is_complete(self, samples: NDArray[np.int64]) -> bool:
        """Whether each of these samples is there."""
        return bool((self._table["tokens"][samples] > 0).all())

    def read(self, sample: int, count: int) -> Tensor | None:
        """Return the features of a sample's first tokens, shape (M, F), or None if absent.

        Args:
            sample: Index of the sample.
            count: Tokens that are wanted.
        """
        entry = self._table[sample]
        tokens = int(entry["tokens"]) - 1
        if tokens < count:
            return None
        row = self._width * self._dtype.itemsize
        data = self._bytes(sample)[: tokens * row]
        if zlib.crc32(data) != int(entry["checksum"]):
            self._table[sample] = (0, 0)
            return None
        kept = (
            torch.frombuffer(bytearray(data[: count * row]), dtype=self._dtype) if count else None
        )
        return torch.empty(0, self._width, dtype=self._dtype) if kept is None else _rows(kept, self)

    def write(self, sample: int, features_MF: Tensor) -> None:
        """Keep the features of a sample's first tokens; the table follows the data."""
        flat = features_MF.detach().to("cpu", self._dtype).contiguous().view(torch.uint8).numpy()
        data = flat.reshape(-1)
        place = self._bytes(sample)
        if len(data):
            # On a full disk this is an error, and writing to the map would be a signal.
            file = self._data[int(self._shards[sample])][0]
            os.posix_fallocate(file, int(self._starts[sample]), len(data))
        place[: len(data)] = data
        self._table[sample] = (len(features_MF) + 1, zlib.crc32(data.data))

    def forget(self, samples: Sequence[int]) -> None:
        """Drop samples, so that they are captured anew."""
        self._table["tokens"][list(samples)] = 0

    @property
    def width(self) -> int:
        """Width of the features."""
        return self._width

    def _bytes(self, sample: int) -> Any:
        shard = int(self._shards[sample])
        if shard not in self._data:
            size = int((self._starts + self._sizes)[self._shards == shard].max())
            file = self._folder / f"features-{shard:05d}.bin"
            data = _mapped(file, size, sparse=True)
            descriptor = os.open(file, os.O_RDWR)
            weakref.finalize(self, os.close, descriptor)
            self._data[shard] = descriptor, data
        start = int(self._starts[sample])
        return self._data[shard][1][start : start + int(self._sizes[sample])]


def cache_bytes(lengths: NDArray[np.int64], *, num_features: int, dtype: torch.dtype) -> int:
    """Return how large a cache of samples of these lengths is."""
    return int(_sample_bytes(lengths, num_features, dtype).sum())


def make_room(config: CacheConfig, needs: Sequence[tuple[dict[str, str], int]]) -> list[Path]:
    """Make or find the folders of a run's caches, dropping the longest unused others if need be.

    Args:
        config: Where caches are, and how large they may get.
        needs: What the features of each cache belong to, by name, and their bytes in this run.

    Raises:
        ConfigError: The caches do not fit into the quota, or onto the disk.
        ArtifactError: A folder holds a cache of something else.
    """
    need = sum(size for _, size in needs)
    quota = int(config.quota_gib * GIB)
    if need > quota:
        raise ConfigError(
            f"the run's features take {need / GIB:,.1f} GiB, the quota is "
            f"{config.quota_gib:,.1f} GiB; raise training.cache.quota_gib or set "
            "training.features to 'online'"
        )
    folders = [config.path / content_digest(identity)[:16] for identity, _ in needs]
    config.path.mkdir(parents=True, exist_ok=True)
    with (config.path / LOCK_NAME).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other ranks and runs drop and describe folders too
        _drop_others(config.path, folders, quota - need)
        there = sum(_disk_bytes(folder) for folder in folders if folder.is_dir())
        free = shutil.disk_usage(config.path).free
        if need - there > free:
            raise ConfigError(
                f"the run's features take {(need - there) / GIB:,.1f} GiB more, the disk of "
                f"{config.path} has {free / GIB:,.1f} GiB left; make room there, or set "
                "training.cache.path to a larger disk or training.features to 'online'"
            )
        for folder, (identity, _) in zip(folders, needs, strict=True):
            folder.mkdir(exist_ok=True)
            description = folder / DESCRIPTION_NAME
            if description.is_file() and json.loads(description.read_bytes()) != identity:
                raise ArtifactError(f"{folder} holds features of something else; remove it")
            # The file's time tells the last use.
            atomic_write(description, json.dumps(identity, indent=1) + "\n")
    return folders


def _drop_others(root: Path, own: Sequence[Path], room: int) -> None:
    others = [path.parent for path in root.glob(f"*/{DESCRIPTION_NAME}") if path.parent not in own]
    others.sort(key=lambda folder: (folder / DESCRIPTION_NAME).stat().st_mtime)
    used = {folder: _disk_bytes(folder) for folder in others}
    for folder in others:
        if sum(used.values()) <= room:
            return
        with (folder / LOCK_NAME).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # a run is using it
            shutil.rmtree(folder)
            del used[folder]
    if sum(used.values()) > room:
        raise ConfigError(
            f"feature caches in use in {root} take {sum(used.values()) / GIB:,.1f} GiB and leave "
            "no room in the quota; raise training.cache.quota_gib"
        )


def _disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


def _sample_bytes(
    lengths: NDArray[np.int64], num_features: int, dtype: torch.dtype
) -> NDArray[np.int64]:
    # Context stands strictly before an anchor, so the last token is never read.
    return np.maximum(lengths - 1, 1) * num_features * dtype.itemsize


def _places(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return shard and start of each sample."""
    ends = np.cumsum(sizes)
    shards = (ends - sizes) // SHARD_BYTES
    first = np.searchsorted(shards, shards)
    return shards, (ends - sizes) - (ends - sizes)[first]


def _mapped(file: Path, size: int, *, sparse: bool) -> NDArray[np.uint8]:
    """Map a file of at least this size, which takes its place on the disk now or when written."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if os.fstat(descriptor).st_size < size:
            if not sparse:
                os.posix_fallocate(descriptor, 0, size)
            os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    return np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))


def _rows(flat: Tensor, cache: FeatureCache) -> Tensor:
    return flat.view(-1, cache.width)
