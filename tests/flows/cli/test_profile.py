"""``dflash-flow profile`` from the outside."""

import json
import os

import polars as pl
import pytest

from dflash_core.profiling import LengthProfile
from flows.cli import main


def test_programs_read_one_object_and_people_a_table(tmp_path, capsys):
    data = tmp_path / "data.parquet"
    pl.DataFrame({"length": [3, 3, 0, 90], "domain": ["a", "b", "a", "b"]}).write_parquet(data)
    saved = tmp_path / "profile.json"
    assert main(["profile", str(data), "--max-length", "50", "--json", "--save", str(saved)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_samples"], facts["total_tokens"], facts["num_dropped"]) == (2, 6, 2)
    assert facts["bad"]["oversize"] == facts["bad"]["zero"] == 1
    assert facts["domains"]["b"]["max"] == 3
    assert LengthProfile.from_json(saved.read_text()).counts.tolist() == [2]
    assert main(["profile", str(data)]) == 0
    assert "1 zero; 1 samples dropped" in " ".join(capsys.readouterr().out.split())


def test_a_profile_of_nothing_usable_still_reports(tmp_path, capsys):
    data = tmp_path / "data.parquet"
    pl.DataFrame({"length": [0, None]}).write_parquet(data)
    assert main(["profile", str(data)]) == 0
    assert "2 samples dropped" in capsys.readouterr().out


def test_a_missing_file_exits_with_2(tmp_path, capsys):
    assert main(["profile", str(tmp_path / "absent.parquet")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["profile", str(tmp_path), "--max-length", "0"]) == 2
    assert "max_length is 0; give at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (".", ". is a folder, which is not replaced; name a file"),
        ("pipe", "pipe is a pipe or device, which is not replaced; name a file"),
        ("/proc/version/profile", "/proc/version cannot be used: File exists"),
        ("n" * 250, f"{'n' * 250} cannot be used: File name too long"),
    ],
)
def test_what_cannot_be_saved_there_is_one_sentence(tmp_path, capsys, monkeypatch, place, sentence):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    pl.DataFrame({"length": [3]}).write_parquet("data.parquet")
    assert main(["profile", "data.parquet", "--save", place]) in {1, 2}
    assert capsys.readouterr().err == f"dflash-flow: {sentence}\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.parquet", "pipe"]


def test_saved_profiles_of_shards_merge_to_the_profile_of_everything(tmp_path, capsys):
    shards = []
    for number, lengths in enumerate([[3, 5], [5, 90]]):
        data = tmp_path / f"{number}.parquet"
        pl.DataFrame({"length": lengths}).write_parquet(data)
        shards.append(str(tmp_path / f"{number}.json"))
        assert main(["profile", str(data), "--max-length", "50", "--save", shards[-1]]) == 0
    capsys.readouterr()
    assert main(["profile", *shards, "--json"]) == 0
    merged = json.loads(capsys.readouterr().out)
    assert main(["profile", str(tmp_path), "--max-length", "50", "--json"]) == 0
    assert merged == json.loads(capsys.readouterr().out)
    assert main(["profile", *shards, "--max-length", "60"]) == 2
    assert "was made with max_length 50, not 60" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}x")
    assert main(["profile", str(tmp_path / "other.json")]) == 2
    assert "holds no saved profile" in capsys.readouterr().err
