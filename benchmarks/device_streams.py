"""Do split roles hang, and do they overlap, where communication waits on device streams?

Runs the real stages and channel over emulated streams with NCCL's semantics (see
``tests/dflash_core/training/ranks/emulation.py``): no GPU is used. Prints, for each split of ranks,
how many of so many seeds ended, and the time of a run as a multiple of its slower side alone.

    python benchmarks/device_streams.py --seeds 100
"""

import argparse
import statistics
from dataclasses import replace

from tests.dflash_core.training.ranks.emulation import Stuck, Trial, alone_s, run

SPLITS = ((1, 1), (2, 2), (2, 6), (4, 4), (6, 2))
LARGE = (4, 28)
OVERLAP_SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    arguments = parser.parse_args()
    for targets, drafters in (*SPLITS, LARGE):
        for sharded in (False, True):
            trial = Trial(targets, drafters, sharded=sharded)
            ended = sum(_ends(replace(trial, seed=seed)) for seed in range(arguments.seeds))
            line = f"{targets}+{drafters} {'sharded' if sharded else 'whole':8}"
            line += f" {ended} of {arguments.seeds} seeds ended"
            if (targets, drafters) != LARGE:
                found = [_overlap(trial, seed) for seed in range(OVERLAP_SEEDS)]
                line += f", {statistics.median(found):.2f} x the slower side"
                line += f" ({min(found):.2f} to {max(found):.2f})"
            print(line, flush=True)


def _ends(trial: Trial) -> bool:
    try:
        run(trial)
    except Stuck:
        return False
    return True


def _overlap(trial: Trial, seed: int) -> float:
    """Return the run's time over its slower side's, both sides being equally busy in the mean."""
    draft_s = 0.06
    target_s = draft_s * trial.num_targets / trial.num_consumers
    slow = replace(
        trial,
        target_s=target_s,
        draft_s=draft_s,
        jitter=0.25,
        num_steps=20,
        seed=seed,
        wire_s=0.002,
    )
    return run(slow) / alone_s(slow)


if __name__ == "__main__":
    main()
