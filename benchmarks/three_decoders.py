"""Three independent decoders on the drafter of a finished run: the same tokens, the same forwards.

Ours, the authors' package and transformers' ``generate(assistant_model=...)`` continue held-out
prompts of the run greedily in float32, each from its own export of the drafter. Run after
``make demo``, with the package ``dflash`` installed: ``python benchmarks/three_decoders.py
runs/demo/training``. It ends with the acceptance length, or at the first text that is not the same.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from dflash_core.corpus.store import TokenStore
from dflash_core.decoding.prompts import store_prompts
from dflash_core.target.loading import load_target
from dflash_core.training.config import TrainingJob
from dflash_core.training.drafter import load_checkpoint_drafter
from tests.dflash_core.export.decoders import three_agree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished training")
    parser.add_argument("--max-prompts", type=int, default=40, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=80, metavar="N")
    arguments = parser.parse_args()
    job = TrainingJob.model_validate_json((arguments.run / "job.json").read_bytes())
    drafter = load_checkpoint_drafter(arguments.run).float()
    layers = {"layer_ids": drafter.spec.target_layer_ids, "dtype": "float32"}
    target = load_target(job.target.model_copy(update=layers), device=torch.device("cpu"))
    store = TokenStore.open(job.held_out_store or job.store)
    prompts = [p.token_ids for p in store_prompts(store, max_prompts=arguments.max_prompts)]
    with tempfile.TemporaryDirectory() as folder:
        length = three_agree(
            target, drafter, prompts, Path(folder), num_tokens=arguments.max_new_tokens
        )
    print(f"{len(prompts)} texts are the same in all three; {length:.2f} tokens a target forward")


if __name__ == "__main__":
    main()
