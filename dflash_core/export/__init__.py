"""Who can serve it? Checkpoint layouts and the check that they load."""

from dflash_core.export.checkpoint import load_checkpoint_drafter
from dflash_core.export.write import DRAFTER_KIND, Layout, export_drafter
from dflash_core.export.zlab import load_drafter, read_spec

__all__ = [
    "DRAFTER_KIND",
    "Layout",
    "export_drafter",
    "load_checkpoint_drafter",
    "load_drafter",
    "read_spec",
]
