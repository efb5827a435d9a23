"""Bad input: one sentence with the value and the setting, exit code 2, nothing half-written."""

from pathlib import Path

import pytest

from flows.cli import main

TARGET = '[target]\npath = "target"\nlayer_ids = [0, 1, 2]\n'
SMALL = "[corpus]\nsource = 'files'\ninputs = ['chats.jsonl']\nmax_length = 64\n"
HUGE = f"{10**30}"


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
        ("[target]\npath = 5\n", "target.path: Input is not a valid path"),
        (
            TARGET + SMALL.replace("'chats.jsonl'", "1"),
            "corpus.inputs.0: Input is not a valid path",
        ),
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["watch", ".", "--every", "-1"], "--every -1 is no time between looks"),
        (["watch", ".", "--every", "nan"], "--every nan is no time between looks"),
        (["join", "--flow-run", "x", "--patience", "nan"], "--patience nan is no time to wait"),
        (["plan", "x.npy", "--max-samples", HUGE], "max_samples: Input should be less than"),
        (["plan", "x.npy", "--anchor-budget", HUGE], "anchor_budget: Input should be less than"),
        (["plan", "x.npy", "--edges", HUGE], "edges: edge 1,000,000,000,000,000,000,000,000"),
        (["runs", "--limit", "0"], "--limit 0 is out of range; MLflow lists 1 to 50,000 runs"),
        (["runs", "--limit", "100000"], "--limit 100000 is out of range"),
        (["runs", "--uri", "foo://bar"], "MLflow cannot work with foo://bar: "),
    ],
)
def test_an_option_out_of_range_is_one_sentence(
    workplace: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(words) in {1, 2}
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert not list(workplace.iterdir())


def test_a_damaged_database_is_one_sentence(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (workplace / "mlflow").mkdir()
    (workplace / "mlflow" / "mlflow.db").write_text("no database\n" * 100)
    assert main(["runs", "--root", "."]) == 1
    said = capsys.readouterr().err
    assert "mlflow.db: " in said and "file is not a database" in said and said.count("\n") == 1


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
