"""``torchrun --nproc-per-node N -m dflash_core.training --config job.json``."""

import os
import sys

from dflash_core.training.stop import StopRequest

if __name__ == "__main__":
    stop = StopRequest().listen()
    from dflash_core.training.program import main  # takes seconds, so it comes after

    code = main(stop=stop)
    sys.stdout.flush()
    sys.stderr.flush()
    # A failed rank may hold threads that wait for peers inside the communication library.
    os._exit(code)
