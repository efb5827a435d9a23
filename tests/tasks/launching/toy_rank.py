"""A rank for tests: joins the others, writes steps and its pid, then does what it is told."""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from dflash_core.errors import TrainingError
from dflash_core.training.config import TopologyConfig, TrainingConfig
from dflash_core.training.ranks.groups import join_ranks
from dflash_core.training.telemetry.metrics import write_status


def main(run_dir: Path, what: str, *others: str) -> None:
    config = TrainingConfig(topology=TopologyConfig(num_ranks=2), timeout_s=60)
    with join_ranks(config) as ranks:
        ranks.meet(what="the start")
        (run_dir / f"rank{ranks.rank}.pid").write_text(str(os.getpid()))
        sys.stdout.write(f"rank {ranks.rank} got {others}\n")
        if ranks.is_first:
            write_steps(run_dir, 3)
        if what == "fail":
            if ranks.rank == 1:
                speak()  # its peers notice as soon as it leaves
            ranks.meet(what="a step")  # its peer only notices that it is alone
        if what == "die":
            if not ranks.is_first:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                ranks.meet(what="a step")
            except TrainingError as error:  # its peer writes down what it sees
                write_status(run_dir, "failed", step=2, num_steps=3, reason=str(error))
                raise
        if what == "wait":
            wait_for_sigterm(run_dir, ranks.is_first)


def speak() -> None:
    try:
        raise ValueError("the guilty rank speaks")
    except ValueError:
        traceback.print_exc()
        raise


def write_steps(run_dir: Path, num_steps: int) -> None:
    lines = [json.dumps({"step": step, "num_steps": num_steps}) for step in range(1, num_steps + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def wait_for_sigterm(run_dir: Path, is_first: bool) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    (run_dir / f"waiting-{os.getpid()}").touch()
    while not asked:
        time.sleep(0.05)
    if is_first:
        write_status(run_dir, "interrupted", step=2, num_steps=3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
