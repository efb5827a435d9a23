"""How long are the samples? One screening policy and a mergeable histogram."""

from dflash_core.profiling.counting import profile_of_counts
from dflash_core.profiling.drift import length_drift
from dflash_core.profiling.profile import DomainHistogram, LengthProfile
from dflash_core.profiling.reader import TokenColumns, profile_data, read_lengths
from dflash_core.profiling.screening import Screened, screen_lengths
from dflash_core.profiling.spike import TruncationSpike, find_spike

__all__ = [
    "DomainHistogram",
    "LengthProfile",
    "Screened",
    "TokenColumns",
    "TruncationSpike",
    "find_spike",
    "length_drift",
    "profile_data",
    "profile_of_counts",
    "read_lengths",
    "screen_lengths",
]
