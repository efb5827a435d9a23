import numpy as np

from dflash_core.throughput import fitting_budget, worst_micro_batches
from tests.dflash_core.throughput.machines import plan


def test_the_worst_micro_batches_are_the_largest_in_each_respect():
    found = plan(strategy="random")
    worst = worst_micro_batches(
        rows=found.rows, padded_lengths=found.padded_lengths, num_anchors=found.num_anchors
    )
    names = {name: index for index, names in worst.items() for name in names.split(", ")}
    assert found.slots[names["token slots"]] == found.slots.max()
    assert found.num_anchors[names["anchors"]] == found.num_anchors.max()
    assert found.rows[names["rows"]] == found.rows.max()
    squares = found.rows * found.padded_lengths**2
    assert squares[names["squared length"]] == squares.max()
    assert 1 <= len(worst) <= 4


def test_a_budget_that_fits_leaves_the_fixed_memory_alone():
    assert fitting_budget(1000, peak_bytes=900, fixed_bytes=400, limit_bytes=650) == 500
    assert fitting_budget(1000, peak_bytes=900, fixed_bytes=400, limit_bytes=300) == 0
    assert fitting_budget(1000, peak_bytes=400, fixed_bytes=400, limit_bytes=800) > 1000
    assert isinstance(fitting_budget(np.int64(8), peak_bytes=2, fixed_bytes=1, limit_bytes=2), int)
