"""``torchrun --nproc-per-node N -m dflash_core.training --config job.json``."""

import sys

from dflash_core.training.ranks.stop import StopRequest, die_with_launcher

if __name__ == "__main__":
    die_with_launcher()
    stop = StopRequest().listen()
    from dflash_core.training.program import main  # takes seconds, so it comes after

    sys.exit(main(stop=stop))
