"""The caches after ragged commits, against target and drafter run afresh on what was committed."""

import pytest
import torch

from dflash_core.decoding import cache as caches
from tests.dflash_core.draft.parts import MASK, small_drafter, small_target

PROMPTS = ([3, 4, 5, 6], [7, 8], [9, 10, 11])
WIDTH = 4


@pytest.mark.parametrize(("holes", "spare"), [(0.25, 16), (0.0, 0)], ids=["holes", "pushed"])
@pytest.mark.parametrize("window", [None, 5])
def test_any_share_of_a_block_can_be_kept(monkeypatch, holes, spare, window):
    """Float32 sums in another order: 1e-4. One row leaves on the way."""
    monkeypatch.setattr(caches, "HOLES", holes)
    monkeypatch.setattr(caches, "SPARE_COLUMNS", spare)
    target = small_target()
    kinds = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": window}
    drafter = small_drafter(target, **kinds if window else {}).eval()
    cache = caches.DecodingCache(target, len(PROMPTS), drafter)
    texts = [list(prompt) for prompt in PROMPTS]
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    real = torch.tensor([[i >= longest - len(text) for i in range(longest)] for text in texts])
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        cache.verify(ids, real)
        cache.commit(real)
        for step in range(12):
            if step == 7:
                cache.select(torch.tensor([0, 2]))
                texts = [texts[0], texts[2]]
            block = torch.randint(2, MASK, (len(texts), WIDTH), generator=generator)
            drafted = cache.draft(block[:, 0], WIDTH)
            found = cache.verify(block)
            for row, text in enumerate(texts):
                expected, hidden = _afresh(target, drafter, text, block[row])
                torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(drafted[row], hidden, atol=1e-4, rtol=1e-4)
            kept = torch.randint(1, WIDTH + 1, (len(texts), 1), generator=generator)
            cache.commit(torch.arange(WIDTH) < kept)
            for row, text in enumerate(texts):
                text += block[row, : int(kept[row])].tolist()
                assert int(cache.lengths_B[row]) == len(text)
            assert spare or cache.valid_BL.shape[1] == max(map(len, texts))


def _afresh(target, drafter, text, block):
    """The target's logits after each block token, and the drafter's slots, without any cache."""
    ids = torch.tensor([[*text, *block.tolist()]])
    output = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    states = [output.hidden_states[layer + 1][0, : len(text)] for layer in target.layer_ids]
    context = drafter.context(torch.cat(states, dim=-1), torch.arange(len(text)))
    positions = torch.arange(len(text), len(text) + WIDTH)[None]

    def attend(query, own, known, layer):
        key = torch.cat([known[0], own[0][0]]).transpose(0, 1)[None]
        value = torch.cat([known[1], own[1][0]]).transpose(0, 1)[None]
        place, at = positions[0][:, None], torch.arange(key.shape[2])
        seen = torch.ones(WIDTH, key.shape[2], dtype=torch.bool)
        if drafter.spec.causal(layer):
            seen &= at <= place
        if drafter.spec.window(layer) is not None:
            seen &= place - at < drafter.spec.window(layer)
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=seen, enable_gqa=True
        )
        return out.transpose(1, 2)

    noise = drafter.noise(block[:1], target.input_embeddings.weight, width=WIDTH)
    hidden = drafter(noise, positions, context, attend)[0, 1:]
    return output.logits[0, len(text) :], hidden
