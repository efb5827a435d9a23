"""How long are the samples? One screening policy and a mergeable histogram."""

from dflash_core.profiling.profile import DomainHistogram, LengthProfile, TruncationSpike
from dflash_core.profiling.screening import Screened, screen_lengths

__all__ = ["DomainHistogram", "LengthProfile", "Screened", "TruncationSpike", "screen_lengths"]
