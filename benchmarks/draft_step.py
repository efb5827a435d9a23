"""One drafter training step on this machine, against the matrix products it cannot do without.

Prints, for short and long answers: CPU seconds of a step (forward, loss, backward), the floor (the
same matrix products alone, forward and backward, attention counted with each query's own visible
keys), the same step with a dense mask, peak memory, and useful block tokens a second: supervised
tokens in scored slots. Run: ``python benchmarks/draft_step.py [--anchors 64] [--threads 2]``.
Sizes are SmolLM2's: width 576, 9/3 heads, MLP 1536, 3 layers, vocabulary 49,152, blocks of 8.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.corpus.store import Sample
from dflash_core.draft.attention import dense_mask
from dflash_core.draft.batch import DraftBatch, collate
from dflash_core.draft.config import LossConfig
from dflash_core.draft.loss import draft_hidden, draft_loss
from dflash_core.draft.model import DraftModel
from dflash_core.draft.spec import DraftSpec
from dflash_core.planning.anchors import AnchorConfig

VOCABULARY = 49_152
SPEC = DraftSpec(
    hidden_size=576,
    num_layers=3,
    block_size=8,
    intermediate_size=1_536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=VOCABULARY,
    mask_token_id=0,
    target_layer_ids=(1, 8, 14, 20, 27),
    num_target_layers=30,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    layer_types=("full_attention",) * 3,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = DraftModel(SPEC)
    head_VD = 0.05 * torch.randn(VOCABULARY, SPEC.hidden_size)
    for name, rows, length, prompt in (
        ("short answers", 16, 64, 32),
        ("long answers", 1, 1_024, 256),
    ):
        batch = make_batch(rows, length, prompt, arguments.anchors)
        result = measure(model, head_VD, batch, arguments.repeats)
        print(json.dumps({"case": name, "rows": rows, "length": length, **result}))


def make_batch(rows: int, length: int, prompt: int, anchors: int) -> DraftBatch:
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            rng.integers(1, VOCABULARY, length).astype(np.int32),
            np.arange(length) >= prompt,
            "",
            str(row),
        )
        for row in range(rows)
    ]
    each = anchors // rows
    return collate(
        [[sample] for sample in samples],
        padded_length=length,
        block_size=SPEC.block_size,
        mask_token_id=SPEC.mask_token_id,
        anchors=AnchorConfig(min_anchors=each, max_anchors=each),
        seed=0,
        epoch=0,
    )


def measure(model: DraftModel, head_VD: Tensor, batch: DraftBatch, repeats: int) -> dict:
    """Interleave the three and take medians, so that the machine's other load meets all alike."""
    features = torch.randn(len(batch.context_index_M), SPEC.feature_size)

    def step() -> None:
        model.zero_grad()
        loss = draft_loss(
            model, features, batch, LossConfig(), embedding_VD=head_VD, head_VD=head_VD
        )
        loss.loss_sum.backward()

    def dense_step() -> None:
        model.zero_grad()
        hidden_NKD = draft_hidden(model, head_VD, features, batch, DenseAttention(batch))
        logits = hidden_NKD.flatten(0, 1) @ head_VD.T
        labels = torch.where(batch.valid_NK, batch.labels_NK, -100).flatten()
        F.cross_entropy(logits, labels, reduction="sum").backward()

    floor, floor_flop = matmul_floor(batch)
    times: dict[str, list[float]] = {"floor_s": [], "step_s": [], "dense_s": []}
    peaks = {}
    for _ in range(repeats):
        for name, run in (("floor_s", floor), ("step_s", step), ("dense_s", dense_step)):
            times[name].append(seconds(run))
            peaks.setdefault(name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    medians = {name: statistics.median(values) for name, values in times.items()}
    useful = int(batch.valid_NK.sum())
    return {
        "num_anchors": batch.num_anchors,
        "useful_tokens": useful,
        **{name: round(value, 4) for name, value in medians.items()},
        "step_over_floor": round(medians["step_s"] / medians["floor_s"], 3),
        "dense_over_step": round(medians["dense_s"] / medians["step_s"], 3),
        "useful_tokens_per_s": round(useful / medians["step_s"], 1),
        "dense_useful_tokens_per_s": round(useful / medians["dense_s"], 1),
        "floor_gflop": round(floor_flop / 1e9, 1),
        "peak_gib_after": {name.removesuffix("_s"): round(v, 2) for name, v in peaks.items()},
    }


class DenseAttention:
    """The whole mask in one SDPA call, as most public trainers have it on a CPU."""

    def __init__(self, batch: DraftBatch) -> None:
        self.mask = dense_mask(batch, SPEC, 0)

    def __call__(self, query, own, context, layer):
        key, value = (
            torch.cat([c, o.flatten(0, 1)]).transpose(0, 1)[None]
            for c, o in zip(context, own, strict=True)
        )
        out = F.scaled_dot_product_attention(
            query.flatten(0, 1).transpose(0, 1)[None],
            key,
            value,
            attn_mask=self.mask,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).unflatten(0, query.shape[:2])


def matmul_floor(batch: DraftBatch) -> tuple[Callable[[], None], float]:
    """Return the step's matrix products alone, forward and backward, and their FLOP."""
    slots = batch.num_anchors * SPEC.block_size
    context = len(batch.context_index_M)
    width, keys = SPEC.hidden_size, 2 * SPEC.num_key_value_heads * SPEC.head_dim
    queries = SPEC.num_attention_heads * SPEC.head_dim
    mlp = SPEC.intermediate_size
    # (rows, in, out, products): forward, gradient of the input, gradient of the weight.
    shapes = [(context, SPEC.feature_size, width, 2)]
    for _ in range(SPEC.num_layers):
        shapes += [
            (context, width, keys, 3),
            (slots, width, queries + keys, 3),
            (slots, queries, width, 3),
            (slots, width, 2 * mlp, 3),
            (slots, mlp, width, 3),
        ]
    shapes.append((int(batch.valid_NK.sum()), width, VOCABULARY, 2))
    pairs = [(torch.randn(r, i), torch.randn(i, o), n) for r, i, o, n in shapes]
    visible = float((batch.anchor_positions_N + SPEC.block_size).double().mean())
    heads = SPEC.num_attention_heads
    query = torch.randn(heads, slots, SPEC.head_dim)
    key = torch.randn(heads, SPEC.head_dim, round(visible))
    attention = 2 * heads * slots * SPEC.head_dim * round(visible)

    def run() -> None:
        for left, right, products in pairs:
            for _ in range(products):
                left @ right
        for _ in range(6 * SPEC.num_layers):  # two forward, four backward
            query @ key

    flop = sum(2 * r * i * o * n for r, i, o, n in shapes) + 6 * SPEC.num_layers * attention
    return run, flop


def seconds(run: Callable[[], None]) -> float:
    """CPU seconds over threads: other load on the machine does not count."""
    begin = time.process_time()
    run()
    return (time.process_time() - begin) / torch.get_num_threads()


if __name__ == "__main__":
    main()
