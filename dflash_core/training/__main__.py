"""``torchrun --nproc-per-node N -m dflash_core.training --config job.json``."""

import sys

from dflash_core.training.program import main

sys.exit(main())
