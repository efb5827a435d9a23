"""Anchors, contexts and labels of a micro-batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.draft.anchors import eligible_anchors, sample_anchors
from dflash_core.draft.batch import collate
from dflash_core.errors import DataError
from dflash_core.planning.anchors import AnchorConfig, num_anchors
from tests.dflash_core.draft.parts import MASK, batch_of, document

masks = st.lists(st.booleans(), min_size=1, max_size=60).map(np.array)


@given(masks, st.integers(0, 3))
def test_anchors_are_distinct_eligible_and_as_many_as_planned(mask, epoch):
    config = AnchorConfig(anchors_per_supervised_token=0.3, min_anchors=2, max_anchors=9)
    anchors = sample_anchors(mask, "sample", seed=1, epoch=epoch, config=config)
    eligible = eligible_anchors(mask)
    planned = int(num_anchors(np.array([mask.sum()]), config)[0])
    assert np.all(np.diff(anchors) > 0)
    assert np.isin(anchors, eligible).all()
    assert len(anchors) == min(planned, len(eligible))


@given(masks)
def test_every_position_before_a_supervised_one_can_be_an_anchor(mask):
    """However close to the end: blocks may be partial."""
    expected = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert eligible_anchors(mask).tolist() == expected


def test_anchors_depend_on_seed_epoch_and_sample_only():
    mask = np.arange(400) >= 40
    config = AnchorConfig()

    def draw(name="a", *, seed=0, epoch=0):
        return sample_anchors(mask, name, seed=seed, epoch=epoch, config=config).tolist()

    assert draw() == draw()
    assert len({tuple(draw()), tuple(draw("b")), tuple(draw(seed=1)), tuple(draw(epoch=1))}) == 4


def test_a_sample_keeps_its_anchors_whatever_it_sits_with():
    alone = batch_of([[document(50, seed=1)]])
    together = batch_of([[document(90, seed=2)], [document(50, seed=1)]])
    packed = batch_of([[document(33, seed=3), document(50, seed=1)]])
    expected = alone.anchor_positions_N
    for batch, place in ((together, 1), (packed, 1)):
        found = batch.anchor_positions_N[batch.anchor_documents_N == place]
        assert torch.equal(found, expected)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=3), min_size=1, max_size=3))
def test_labels_are_the_tokens_after_the_anchor_inside_its_supervised_run(lengths):
    rows = [
        [document(n, prompt=n // 3, seed=i, gaps=(n // 2,)) for n in row]
        for i, row in enumerate(lengths)
    ]
    batch = batch_of(rows)
    documents = [sample for row in rows for sample in row]
    assert batch.num_documents == len(documents)
    for n in range(batch.num_anchors):
        sample = documents[int(batch.anchor_documents_N[n])]
        anchor = int(batch.anchor_positions_N[n])
        row, column = int(batch.anchor_rows_N[n]), int(batch.anchor_columns_N[n])
        assert batch.input_ids_BT[row, column] == sample.input_ids[anchor]
        assert batch.labels_NK[n, 0] == sample.input_ids[anchor]
        for slot in range(1, 4):
            run = sample.loss_mask[anchor : anchor + slot + 1]
            valid = len(run) == slot + 1 and bool(run.all())
            assert bool(batch.valid_NK[n, slot]) == valid
            if valid:
                assert batch.labels_NK[n, slot] == sample.input_ids[anchor + slot]


def test_coverage_counts_supervised_tokens_that_stand_in_a_scored_slot():
    whole = batch_of([[document(40)]], anchors_per_supervised_token=1.0)
    assert (whole.num_supervised, whole.num_covered) == (35, 34)
    assert batch_of([[document(40)]]).num_covered < 34


def test_a_document_without_anchors_is_counted_and_costs_no_context():
    batch = batch_of([[document(30, prompt=30, name="silent")], [document(20)]])
    assert batch.num_without_anchors == 1
    assert batch.context_index_M.min() >= 30


def test_the_context_kept_ends_before_the_last_anchor():
    batch = batch_of([[document(40), document(25)]])
    for place in range(2):
        last = int(batch.anchor_positions_N[batch.anchor_documents_N == place].max())
        documents = batch.document_ids_BT.flatten()[batch.context_index_M]
        assert int((documents == place).sum()) == last


def test_a_row_that_is_too_short_is_refused():
    with pytest.raises(DataError, match="ends at slot 40 of a row of 32"):
        batch_of([[document(40)]], padded_length=32)


def test_a_sample_with_the_mask_token_is_refused():
    sample = document(20, name="clash")
    sample.input_ids[7] = MASK
    with pytest.raises(DataError, match=r"sample clash holds token 96.*draft\.mask_token_id"):
        collate(
            [[sample]],
            padded_length=20,
            block_size=4,
            mask_token_id=MASK,
            anchors=AnchorConfig(),
            seed=0,
            epoch=0,
        )
