"""Three decoders that share no code: ours, the authors' package, and transformers' own.

Each returns the new tokens of a greedy text and the target's forwards that they took.
"""

import dflash.model as reference
import numpy as np
import torch
from transformers import MuseGlimmerAssistantModel

from dflash_core.decoding.plain import stop_tokens
from dflash_core.decoding.speculative import speculative_generate
from dflash_core.export.write import export_drafter


def by_ours(target, drafter, prompt, num_tokens):
    (found,) = speculative_generate(target, drafter, [prompt], max_new_tokens=num_tokens)
    return found.token_ids.tolist(), len(found.acceptance_lengths) + 1


def by_authors(target, drafter, prompt, num_tokens):
    ids, stops = torch.from_numpy(prompt)[None], list(stop_tokens(target))
    return counted(
        target,
        prompt,
        lambda: reference.dflash_generate(
            drafter, target.model, ids, num_tokens, stops, return_stats=False
        ),
    )


def by_transformers(target, drafter, prompt, num_tokens):
    ids = torch.from_numpy(prompt)[None]
    target.model.generation_config.speculation_type = "dflash"
    return counted(
        target,
        prompt,
        lambda: target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            max_new_tokens=num_tokens,
            eos_token_id=list(stop_tokens(target)),
            do_sample=False,
        ),
    )


def counted(target, prompt, decode):
    forwards = []
    hook = target.model.register_forward_hook(lambda *_: forwards.append(1))
    (ids,) = decode()
    hook.remove()
    return ids[len(prompt) :].tolist(), len(forwards)


def three_agree(target, ours, prompts, folder, *, num_tokens=48):
    """Assert that the loops decode alike, each from its own export; return the acceptance length.

    The acceptance length counts the first token's forward too. Drafter and target are float32: in
    bfloat16 a block and a single step differ by themselves.
    """
    zlab = export_drafter(ours, folder / "zlab", dtype=torch.float32)
    authors = reference.DFlashDraftModel.from_pretrained(zlab).eval()
    out = export_drafter(ours, folder / "native", layout="transformers", dtype=torch.float32)
    native, info = MuseGlimmerAssistantModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    native.eval()
    num_forwards = tokens = 0
    for number, prompt in enumerate(prompts):
        prompt = np.asarray(prompt, dtype=np.int64)
        found = by_ours(target, ours, prompt, num_tokens)
        assert by_authors(target, authors, prompt, num_tokens) == found, f"text {number}"
        assert by_transformers(target, native, prompt, num_tokens) == found, f"text {number}"
        tokens, num_forwards = tokens + len(found[0]), num_forwards + found[1]
    return tokens / num_forwards
