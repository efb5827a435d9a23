"""Train the demo target from scratch on the Python standard library and write its model card.

    python benchmarks/demo_target.py --epochs 6

The result replaces configs/demo_target (write its README.md anew). Takes tens of minutes on two
cores.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.preparing.prepare import prepare_store
from dflash_core.corpus.stdlib import stdlib_functions, write_stdlib_chats
from dflash_core.corpus.vocabulary import train_vocabulary
from dflash_core.planning.config import BatchingConfig
from dflash_core.target.config import TargetConfig
from dflash_core.training.config import (
    OptimizerConfig,
    TopologyConfig,
    TrainingConfig,
    TrainingJob,
)

VOCAB_SIZE = 2048
CONTEXT = 2048
MAX_LENGTH = 512
ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_cache": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("configs/demo_target"))
    parser.add_argument("--work", type=Path, default=Path("runs/demo-target"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()

    start = arguments.work / "start"
    functions = list(stdlib_functions("train", documented_only=False))
    texts = (text for function in functions for text in (function.prompt, function.source))
    tokenizer = train_vocabulary(texts, vocab_size=VOCAB_SIZE, out=start, max_length=CONTEXT)
    config = ARCHITECTURE | {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (start / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    chats, store = arguments.work / "chats.jsonl", arguments.work / "store"
    write_stdlib_chats(chats, "train", documented_only=False)
    print(prepare_store([chats], start, store, PrepareConfig(max_length=MAX_LENGTH)))

    job = TrainingJob(
        run_dir=arguments.work / "run",
        store=store,
        target=TargetConfig(path=start),
        batching=BatchingConfig(
            strategy="pooled", token_budget=2048, pool_size=512, micro_batches_per_step=2
        ),
        training=TrainingConfig(
            objective="target",
            epochs=arguments.epochs,
            precision=arguments.precision,
            optimizer=OptimizerConfig(
                learning_rate=arguments.learning_rate, weight_decay=0.1, min_lr_ratio=0.02
            ),
            topology=TopologyConfig(num_ranks=2),
        ),
    )
    job_file = arguments.work / "job.json"
    job_file.write_text(job.model_dump_json(indent=1))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "dflash_core.training", "--config", str(job_file)),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True)
    minutes = (time.perf_counter() - began) / 60

    target = job.run_dir / "target"
    if arguments.out.exists():
        shutil.rmtree(arguments.out)
    shutil.copytree(target, arguments.out, ignore=shutil.ignore_patterns("manifest.json"))
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line)["loss"] for line in lines[-50:]]
    print(
        f"{datetime.now(UTC):%Y-%m-%d}: {len(lines)} steps, {minutes:.0f} min, loss of the last "
        f"50 steps {sum(last) / len(last):.3f}"
    )


if __name__ == "__main__":
    main()
