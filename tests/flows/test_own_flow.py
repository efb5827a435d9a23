"""A user's own test of a flow, as the README quotes it."""

from pathlib import Path

import pytest

from flows.train_drafter import train_drafter
from tests.flows.conftest import MakeSettings

README = Path(__file__).resolve().parent.parent.parent / "README.md"


@pytest.mark.usefixtures("prefect_server")
def test_my_gate_rejects_what_pads_too_much(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings(
        compare={"strategies": ["random"]}, gate={"min_padding_efficiency": 0.999}
    )
    state = train_drafter(settings, return_state=True)
    assert state.name == "Rejected"
    assert "none of random/diverse passes the gate" in state.message


def test_the_readme_quotes_this_test() -> None:
    lines = [line.strip() for line in Path(__file__).read_text().splitlines()]
    quoted = README.read_text().split("```python\n")[1].split("```")[0].splitlines()
    assert [line.strip() for line in quoted[1:] if line.strip() not in lines] == []
