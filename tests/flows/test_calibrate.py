"""A kept calibration is used, unless it is to be measured again."""

import pytest

from flows.calibrate import calibrate
from tests.flows.conftest import MakeSettings


@pytest.mark.integration
@pytest.mark.usefixtures("prefect_server")
def test_a_kept_calibration_is_used_unless_asked_again(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings(run={"name": "again"})
    first, second = calibrate(settings), calibrate(settings)
    assert first == second
    anew = tiny_settings(run={"name": "again", "calibrate_again": True})
    assert calibrate(anew) != first
    assert calibrate(settings) != first
