"""Who can serve it? Checkpoint layouts and the check that they load."""

from dflash_core.export.checkpoint import load_checkpoint_drafter
from dflash_core.export.engines import Verdict, judge
from dflash_core.export.write import DRAFTER_KIND, Layout, drafter_config, export_drafter
from dflash_core.export.zlab import load_drafter, read_spec

__all__ = [
    "DRAFTER_KIND",
    "Layout",
    "Verdict",
    "drafter_config",
    "export_drafter",
    "judge",
    "load_checkpoint_drafter",
    "load_drafter",
    "read_spec",
]
