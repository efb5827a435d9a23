"""Before step 1, every token is looked at: one that no model reads would end the run hours in."""

from collections.abc import Iterable

from dflash_core.corpus.store import TokenStore
from dflash_core.errors import DataError
from dflash_core.training.ranks.groups import Ranks

__all__ = ["check_tokens"]


def check_tokens(
    stores: Iterable[TokenStore | None],
    ranks: Ranks,
    *,
    vocab_size: int,
    mask_token_id: int | None = None,
) -> None:
    """Look through the stores, a share on each rank; every rank calls this.

    Args:
        stores: Training and held-out samples.
        ranks: This process among the others.
        vocab_size: Rows of the target's embedding.
        mask_token_id: The drafter's mask token, which no sample may hold.

    Raises:
        DataError: A sample holds the mask token or one that the target does not have.
    """
    for store in stores:
        if store is None:
            continue
        found = store.find_token(
            vocab_size, other=mask_token_id, part=ranks.rank, num_parts=ranks.world_size
        )
        if found is None:
            continue
        sample, token = found
        where = f"sample {store[sample].sample_id} in {store.path} holds token {token:,}"
        if token == mask_token_id:
            raise DataError(
                f"{where}, which is the drafter's mask token; set draft.mask_token_id to an id "
                "that occurs nowhere in the data"
            )
        raise DataError(
            f"{where} but the target has {vocab_size:,} tokens; make the store with the target's "
            "own tokenizer"
        )
    ranks.meet(what="the check of all tokens")
