"""``torchrun --nproc-per-node N -m dflash_core.training --config job.json``."""

import sys

from dflash_core.training.stop import StopRequest

if __name__ == "__main__":
    stop = StopRequest().listen()
    from dflash_core.training.program import main  # takes seconds, so it comes after

    sys.exit(main(stop=stop))
