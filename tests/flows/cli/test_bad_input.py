"""Bad input: one sentence with the value and the setting, exit code 2, nothing half-written."""

from pathlib import Path

import pytest

from flows.cli import main

TARGET = '[target]\npath = "target"\nlayer_ids = [0, 1, 2]\n'
SMALL = "[corpus]\nsource = 'files'\ninputs = ['chats.jsonl']\nmax_length = 64\n"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TARGET + "[training]\nepocs = 3\n", "unknown setting 'training.epocs'"),
        (TARGET + "[gate]\nmin_ktok_s = -1\n", "gate.min_ktok_s: Input should be greater than"),
        (
            TARGET + SMALL + "[batching]\ntoken_budget = 32\n",
            "batching.token_budget 32 is under corpus.max_length 64",
        ),
        (TARGET + "[corpus]\nsource = 'files'\n", "source 'files' names no input"),
        ("[target]\n", "target.path: Field required"),
        ("not toml", "is not valid TOML"),
    ],
)
def test_wrong_settings(
    workplace: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    (workplace / "run.toml").write_text(text)
    assert main(["run", "--config", "run.toml"]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and "Traceback" not in said
    assert [path.name for path in workplace.iterdir()] == ["run.toml"]


def test_missing_settings_file(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", "nowhere.toml"]) == 2
    assert "there is no settings file nowhere.toml" in capsys.readouterr().err


def test_report_of_a_folder_without_a_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(workplace)]) == 2
    assert "holds no summary.json" in capsys.readouterr().err


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    from flows.cli import COMMANDS

    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert COMMANDS[name] in " ".join(capsys.readouterr().out.split())
