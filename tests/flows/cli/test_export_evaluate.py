"""``dflash-flow export`` and ``evaluate`` from the outside, on a drafter of any origin."""

import json

import pytest

from dflash_core.draft import DraftConfig, build_drafter
from dflash_core.export import export_drafter
from dflash_core.target import TargetConfig, load_target
from flows.cli import main
from tests.tiny import TINY_LAYER_IDS, tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target, a new drafter of it, and a file of prompts."""
    root = tmp_path_factory.mktemp("cli")
    path = tiny_target(root / "target")
    target = load_target(TargetConfig(path=path, layer_ids=TINY_LAYER_IDS))
    drafter = build_drafter(DraftConfig(num_layers=1, block_size=4), target)
    export_drafter(drafter, root / "drafter")
    chats = [
        [{"role": "user", "content": f"Write function number {number}."}] for number in range(3)
    ]
    rows = [json.dumps({"messages": chat}) for chat in chats]
    (root / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return root


def words(root, *more):
    given = {"drafter": "drafter", "target": "target", "prompts": "prompts.jsonl"}
    named = [part for name, file in given.items() for part in (f"--{name}", str(root / file))]
    return ["evaluate", *named, "--max-new-tokens", "12", *more]


def test_programs_read_one_report(folders, capsys):
    assert main(words(folders, "--json", "--device", "cpu")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["overall"]["num_prompts"] == 3
    assert report["exactness"]["num_faults"] == 0
    assert report["overall"]["tau"] >= 1


def test_people_read_acceptance_and_speed(folders, capsys):
    assert main(words(folders, "--device", "cpu", "--max-prompts", "1")) == 0
    shown = capsys.readouterr().out
    assert "identical to the target alone: 1 of 1" in shown
    assert "without drafter" in shown


def test_an_export_is_written_and_can_be_exported_again(folders, tmp_path, capsys):
    first, out = str(folders / "drafter"), tmp_path / "again"
    assert main(["export", first, "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["files"]) == {"config.json", "model.safetensors"}
    assert main(["export", str(out), "--out", str(tmp_path / "bf16"), "--dtype", "bfloat16"]) == 0


def test_speculators_needs_the_target(folders, tmp_path, capsys):
    given = [str(folders / "drafter"), "--format", "speculators", "--out", str(tmp_path / "out")]
    assert main(["export", *given]) == 2
    assert "give the target" in capsys.readouterr().err
    assert main(["export", *given, "--target", str(folders / "target")]) == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("drafter", "no folder"), ("target", "no target folder"), ("prompts", "no prompt file")],
)
def test_what_is_not_there_is_named(folders, tmp_path, capsys, name, sentence):
    assert main(words(folders, f"--{name}", str(tmp_path / "nowhere"))) == 2
    assert sentence in capsys.readouterr().err
