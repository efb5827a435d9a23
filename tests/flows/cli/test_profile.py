"""``dflash-flow profile`` from the outside."""

import json

import polars as pl

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
