"""``dflash-flow export`` and ``evaluate`` from the outside, on a drafter of any origin."""

import errno
import json
import os
import shutil

import pytest
import torch

from dflash_core.draft.build import build_drafter
from dflash_core.draft.config import DraftConfig
from dflash_core.export.write import export_drafter
from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import load_target
from flows.cli import main
from tests.tiny import TINY_LAYER_IDS, tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target, a new drafter of it, and a file of prompts."""
    root = tmp_path_factory.mktemp("cli")
    path = tiny_target(root / "target")
    target = load_target(TargetConfig(path=path, layer_ids=TINY_LAYER_IDS))
    drafter = build_drafter(DraftConfig(num_layers=1, block_size=4), target)
    export_drafter(drafter, root / "drafter", dtype=torch.float32)
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


def test_people_read_acceptance_and_speed_at_each_batch_size(folders, tmp_path, capsys):
    """Settings come from a file, from words of theirs and from short words, the last one wins."""
    file = tmp_path / "run.toml"
    file.write_text('[target]\npath = "nowhere"\n[evaluation]\nmax_new_tokens = 3\n')
    more = ["--config", str(file), "--batch-sizes", "1,2", "--evaluation.max_prompts=2"]
    assert main(words(folders, "--device", "cpu", *more)) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert "2 of 2 texts" not in shown and "4 of 4 texts identical to the target alone" in shown
    table = [row for row in rows if row[1:] and row[-1].endswith(("x", "decoding"))][:2]
    assert [row[0] for row in table] == ["1", "2"]
    assert "x plain decoding at batch size 1" in shown


def test_a_target_must_be_named(folders, capsys):
    given = ["--drafter", str(folders / "drafter"), "--prompts", str(folders / "prompts.jsonl")]
    assert main(["evaluate", *given]) == 2
    assert "no target is named; give --target DIR" in capsys.readouterr().err


def test_a_measurement_is_seen_even_if_the_disk_is_full(folders, tmp_path, capsys, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    chats = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "Why?"}], "domain": "[/INST]"}
    chats.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("flows.cli.evaluate.atomic_write", full)
    out = str(tmp_path / "report.json")
    assert main(words(folders, "--prompts", str(chats), "--device", "cpu", "--out", out)) == 1
    shown = capsys.readouterr()
    assert "domain [/INST]" in shown.out and "without drafter" in shown.out
    assert f"{out} cannot be used: No space left on device" in shown.err


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


def test_export_says_who_serves_it_and_strict_insists(folders, tmp_path, capsys):
    config, inner = broken(folders, tmp_path), {"use_swa": True, "swa_window_size": 64}
    raw = json.loads((config / "config.json").read_text())
    raw |= {"layer_types": ["sliding_attention"], "sliding_window": 64, "use_sliding_window": True}
    raw["dflash_config"] |= inner
    (config / "config.json").write_text(json.dumps(raw))
    given = ["export", str(config), "--out", str(tmp_path / "out"), "--target.path"]
    given += [str(folders / "target")]
    assert main([*given, "--json"]) == 0
    engines = {e["engine"]: e for e in json.loads(capsys.readouterr().out)["engines"]}
    assert engines["SGLang 0.5.23"] == {"engine": "SGLang 0.5.23", "refuses": None, "wrong": []}
    shutil.rmtree(tmp_path / "out")
    assert main([*given, "--strict"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "TensorRT-LLM main of 2026-09 serves causality" in said and "(true) instead" in said
    assert not (tmp_path / "out").exists()
    assert main([*given, "--format", "transformers", "--target.pth", "x"]) == 2


def broken(folders, tmp_path, **changes):
    """Anyone's drafter, whose config says something else; inner keys go into dflash_config."""
    copy = tmp_path / "broken"
    shutil.copytree(folders / "drafter", copy, ignore=shutil.ignore_patterns("manifest.json"))
    config = json.loads((copy / "config.json").read_text())
    inner = {key: changes.pop(key) for key in list(changes) if key in config["dflash_config"]}
    config["dflash_config"] |= inner
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_target_layers": "many"}, "is not usable"),
        ({"hidden_size": "wide"}, "is not usable"),
        ({"num_attention_heads": 0}, "is not usable"),
        ({"layer_types": ["foo"]}, "is not usable"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type"),
        ({"target_layer_ids": 3}, "is not usable"),
        ({"target_layer_ids": [0, 1, 9]}, "names layer 9"),
        ({"target_layer_ids": [0, 1, 3]}, "names layer 3, the target's last"),
        ({"block_size": 1}, "block_size"),
        ({"hidden_size": 48}, "has shape"),
        ({"vocab_size": 500}, "vocabulary 500 but the target has 384"),
    ],
)
def test_a_drafter_that_is_wrong_is_one_sentence(folders, tmp_path, capsys, changes, sentence):
    copy = broken(folders, tmp_path, **changes)
    assert main(words(folders, "--drafter", str(copy), "--device", "cpu")) == 2
    last = capsys.readouterr().err.splitlines()[-1]  # loading a target shows its progress before
    assert last.startswith("dflash-flow: ")
    assert sentence in last


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--device", "tpu", "training.device: Input should be 'auto', 'cpu' or 'cuda'"),
        ("--device", "cuda", "training.device is 'cuda' but torch finds no GPU"),
        ("--target.attentoin", "sdpa", "unrecognized arguments: --target.attentoin sdpa"),
        ("--max-new-tokens", "1", "max_new_tokens"),
        ("--temperature", "-1", "temperature"),
        ("--batch-sizes", "8,0", "evaluation.batch_sizes.1: Input should be greater than"),
        ("--out", "/", "/ is a folder"),
        ("--out", "/proc/version/report", "/proc/version cannot be used: File exists"),
    ],
)
def test_a_wrong_option_is_one_sentence(folders, capsys, option, value, sentence):
    assert main(words(folders, option, value)) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("drafter", "no folder"), ("target", "no target folder"), ("prompts", "no prompt file")],
)
def test_what_is_not_there_is_named(folders, tmp_path, capsys, name, sentence):
    assert main(words(folders, f"--{name}", str(tmp_path / "nowhere"))) == 2
    assert sentence in capsys.readouterr().err
