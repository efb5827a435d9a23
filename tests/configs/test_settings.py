"""Settings: file < environment < command line, and one sentence for what is wrong."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.settings import Settings, load_settings
from dflash_core.errors import ConfigError
from flows.cli import first_problem


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[target]\npath = "model"\n[training]\nepochs = 2\nseed = 3\n')
    return path


def test_command_line_wins_over_environment_wins_over_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TRAINING__EPOCHS", "4")
    monkeypatch.setenv("DFLASH_TRAINING__SEED", "5")
    training = load_settings(file, ["--training.seed", "6"]).training
    assert (training.epochs, training.seed) == (4, 6)


def test_paths_in_a_file_are_relative_to_that_file(file: Path) -> None:
    assert load_settings(file).target.path == file.parent / "model"


def test_absolute_paths_in_a_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[target]\npath = "/models/x"\n[corpus]\nsource="files"\ninputs=["a", "/b"]\n')
    settings = load_settings(path)
    assert settings.target.path == Path("/models/x")
    assert settings.corpus.inputs == (tmp_path / "a", Path("/b"))


def test_the_source_is_what_the_inputs_say_however_they_are_given(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings(file).corpus.source == "stdlib"
    assert load_settings(file, ["--corpus.inputs", "a,b"]).corpus.source == "files"
    flow = Settings.model_validate({"target": {"path": "m"}, "corpus": {"inputs": ["a"]}})
    assert flow.corpus.source == "files"
    monkeypatch.setenv("DFLASH_CORPUS__INPUTS", "a")
    assert load_settings(file).corpus.source == "files"
    monkeypatch.delenv("DFLASH_CORPUS__INPUTS")
    file.write_text(file.read_text() + '[corpus]\ninputs = ["a"]\n')
    assert load_settings(file).corpus.source == "files"


@pytest.mark.parametrize("word", ["enable_thinking=false", '{"enable_thinking": false}'])
def test_a_template_variable_that_says_no_is_false(
    file: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    told = load_settings(file, ["--corpus.template_variables", word]).corpus.template_variables
    assert told == {"enable_thinking": False}
    monkeypatch.setenv("DFLASH_CORPUS__TEMPLATE_VARIABLES__ENABLE_THINKING", "false")
    assert load_settings(file).corpus.template_variables == told


def test_settings_are_a_value_that_survives_json(file: Path) -> None:
    settings = load_settings(file)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no settings file .*nowhere\.toml"):
        load_settings(tmp_path / "nowhere.toml")


def test_malformed_toml_is_named(file: Path) -> None:
    file.write_text("[target\n")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        load_settings(file)


@pytest.mark.parametrize(
    "words", [["--trainin.seed", "1"], ["--training.sede", "1"], ["stray"], ["--training.seed"]]
)
def test_unknown_words_are_refused(file: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError):
        load_settings(file, words)


def test_misspelt_section_in_the_environment_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TRIANING__SEED", "1")
    with pytest.raises(ConfigError, match="no section 'trianing'"):
        load_settings(file)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dflash_trainin__epochs", "no section 'trainin'"),
        ("DFLASH_TRAINING_EPOCHS", "two underscores .*: DFLASH_TRAINING__EPOCHS"),
    ],
)
def test_a_misspelt_variable_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.setenv("DFLASH_RUN_SERVICE_HOST", "10.0.0.1")  # of Kubernetes
    load_settings(file)
    monkeypatch.setenv(name, "7")
    with pytest.raises(ConfigError, match=f"the environment sets {name}.*{sentence}"):
        load_settings(file)


def test_the_environment_takes_lists_as_the_command_line_does(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_BATCHING__EDGES", "100,200")
    for value in ("sorted, random", '["sorted", "random"]'):
        monkeypatch.setenv("DFLASH_COMPARE__STRATEGIES", value)
        settings = load_settings(file)
        assert settings.compare.strategies == ("sorted", "random")
        assert settings.batching.edges == (100, 200)
    for name, value in (("COMPARE__STRATEGIES", '["sorted"'), ("COMPARE", "x")):
        monkeypatch.setenv(f"DFLASH_{name}", value)
        with pytest.raises(ValidationError) as problem:
            load_settings(file)
        said = first_problem(problem.value)
        assert said.startswith(name.lower().replace("__", ".")) and value in said
        monkeypatch.delenv(f"DFLASH_{name}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[training]\nepocs = 3\n", "unknown setting 'training.epocs'"),
        ("[batching]\ntoken_budget = 0\n", "batching.token_budget: "),
        ('[run]\nname = "mlflow"\n', "run.name: name 'mlflow' is a folder that all runs"),
        (
            "[training.topology]\nnum_ranks = 10\n",
            "settings: batching.micro_batches_per_step 8 leaves 2 of 10 consuming ranks (20%) idle",
        ),
        ('[corpus]\nsource = "files"\n', "corpus: source 'files' names no input"),
        ('[corpus]\nsource = "stdlib"\ninputs = ["a"]\n', "corpus: source 'stdlib' reads no files"),
        ('[corpus]\nheld_out_inputs = ["a"]\n', "corpus: source 'stdlib' reads no files"),
    ],
)
def test_a_wrong_value_is_one_sentence(file: Path, text: str, sentence: str) -> None:
    file.write_text(f'[target]\npath = "model"\n{text}')
    with pytest.raises(ValidationError) as problem:
        load_settings(file)
    assert first_problem(problem.value).startswith(sentence)
    assert "\n" not in first_problem(problem.value)


@pytest.mark.parametrize("name", ["demo", "seed-8gpu", "seed-8gpu-own", "smollm2"])
def test_ready_made_runs_are_valid_settings(name: str) -> None:
    configs = Path(__file__).resolve().parents[2] / "configs"
    assert load_settings(configs / f"{name}.toml").training.epochs >= 1
