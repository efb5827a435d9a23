"""``prepare`` and ``inspect`` as people and programs call them."""

import json
from pathlib import Path

import pytest

from dflash_core.corpus.vocabulary import train_vocabulary
from flows.cli import main
from tests.tiny import tiny_target

ANEW = ("--regenerate", "--endpoint", "http://127.0.0.1:9", "--model", "m")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_vocabulary(["some text"], vocab_size=280, out=folder, max_length=512)
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [{"question": f"question {k}", "answer": f"answer {k}"} for k in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def store(tmp_path: Path, chats: Path, tokenizer_folder: Path) -> Path:
    prepare(chats, tokenizer_folder, tmp_path / "store")
    return tmp_path / "store"


def prepare(chats: Path, tokenizer_folder: Path, out: Path) -> None:
    words = [str(chats), "--tokenizer", str(tokenizer_folder), "--out", str(out)]
    assert main(["prepare", *words, "--workers", "1"]) == 0


def unwrapped(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without the spaces and line ends that tables put in."""
    return "".join(capsys.readouterr().out.split())


def test_prepare_prints_tables(tmp_path, chats, tokenizer_folder, capsys) -> None:
    prepare(chats, tokenizer_folder, tmp_path / "s")
    out = capsys.readouterr().out
    assert "3 instruction" in out and "samples stored" in out


def test_prepare_prints_one_json_object(tmp_path, chats, tokenizer_folder, capsys) -> None:
    words = [str(chats), "--tokenizer", str(tokenizer_folder), "--out", str(tmp_path / "s")]
    assert main(["prepare", *words, "--workers", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_rows"], report["num_samples"], report["num_rejects"]) == (3, 3, 0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.jsonl"], "none.jsonl names no chat file"),
        (["CHATS", "--tokenizer", "none"], "there is no tokenizer folder none"),
        (
            ["CHATS", "--corpus.max_length", "1"],
            "corpus.max_length: Input should be greater than or equal to 2",
        ),
        (["CHATS", "--corpus.chat_template", "none"], "the template file none cannot be read"),
        (["CHATS", "--endpoint", "http://x"], "corpus.regenerate.endpoint.model: Field required"),
        ([], "there is nothing to prepare; name chat files, or set corpus.inputs"),
        (["CHATS", "--batching.pool_size", "8"], "unrecognized arguments: --batching.pool_size"),
        (["CHATS", *ANEW, "--format", "tree"], "3 of 3 rows were refused"),
        (["CHATS", "/dev/null", *ANEW], "/dev/null is a pipe or the like, which gives its rows"),
        (["CHATS", "--held-out", "none"], "none has no provenance.arrow"),
        (["CHATS", "--format", "tree"], "3 of 3 rows were refused"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path, chats, tokenizer_folder, capsys, words, sentence
) -> None:
    words = [str(chats) if word == "CHATS" else word for word in words]
    if "--tokenizer" not in words:
        words += ["--tokenizer", str(tokenizer_folder)]
    assert main(["prepare", *words, "--out", str(tmp_path / "s"), "--workers", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(f"dflash-flow: {sentence}")
    assert "Traceback" not in captured.err and not (tmp_path / "s").exists()


def test_another_encoding_is_named(tmp_path, chats, tokenizer_folder, capsys) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}", encoding="utf-16")
    words = ["prepare", str(chats), "--tokenizer", str(tokenizer_folder)]
    words += ["--out", str(tmp_path / "s"), "--workers", "1"]
    assert main([*words, "--corpus.chat_template", str(template)]) == 2
    assert "template.jinja is not UTF-8: byte 0xff at 0; convert it" in capsys.readouterr().err
    chats.write_text(chats.read_text(), encoding="utf-16")
    assert main(words) == 2
    assert capsys.readouterr().err.endswith("chats.jsonl is UTF-16, not UTF-8; convert it\n")


def test_answers_of_other_chats_or_another_target_are_not_reused(tmp_path, chats, capsys) -> None:
    target, out = tiny_target(tmp_path / "target"), tmp_path / "s"
    words = ["prepare", str(chats), "--tokenizer", str(target), "--out", str(out), "--workers", "1"]
    words += ["--regenerate", "--corpus.regenerate.max_new_tokens", "8"]
    words += ["--corpus.regenerate.temperature", "2"]  # greedily it says nothing but line ends
    assert main(words) == main(words) == 0
    text = chats.read_text()
    chats.write_text(text.replace("question 0", "question 9"))
    assert main(words) == 2
    assert "s.regenerated.jsonl was begun with another inputs" in capsys.readouterr().err
    chats.write_text(text)
    tiny_target(target, seed=1)
    assert main(words) == 2
    assert "s.regenerated.jsonl was begun with another target" in capsys.readouterr().err


def test_inspect_counts_by_domain(store: Path, capsys) -> None:
    capsys.readouterr()
    assert main(["inspect", str(store), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "chats" in out and "every shard agrees" in " ".join(out.split())


def test_names_that_look_like_markup_are_shown_as_they_are(
    tmp_path, tokenizer_folder, capsys
) -> None:
    chats = tmp_path / "chats.jsonl"
    row = {"question": "why", "answer": "because", "domain": "[/I]:b:"}
    chats.write_text(json.dumps(row) + "\n")
    store = tmp_path / "d[en]" / "st"
    prepare(chats, tokenizer_folder, store)
    assert "d[en]/st" in unwrapped(capsys)
    assert main(["inspect", str(store)]) == 0
    shown = unwrapped(capsys)
    assert "[/I]:b:" in shown and "d[en]/st" in shown
    assert main(["profile", str(store)]) == 0
    assert "[/I]:b:" in unwrapped(capsys)


def test_inspect_gives_programs_the_counts(store: Path, capsys) -> None:
    capsys.readouterr()
    assert main(["inspect", str(store), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_samples"] == facts["domains"]["chats"]["samples"] == 3


def test_inspect_marks_supervised_text_in_a_pipe(store: Path, capsys) -> None:
    capsys.readouterr()
    assert main(["inspect", str(store), "--row", "1"]) == 0
    assert "⟦answer 1<|im_end|>⟧" in capsys.readouterr().out


def test_inspect_shows_single_tokens(store: Path, capsys) -> None:
    capsys.readouterr()
    assert main(["inspect", str(store), "--row", "1", "--tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("* '<|im_end|>'" in line for line in lines)


def test_inspect_gives_programs_the_runs(store: Path, capsys) -> None:
    capsys.readouterr()
    assert main(["inspect", str(store), "--row", "0", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["text"] for run in runs if run["supervised"]] == ["answer 0<|im_end|>"]


def test_inspect_refuses_rows_that_are_not_there(store: Path, capsys) -> None:
    assert main(["inspect", str(store), "--row", "3"]) == 2
    assert "give --row from 0 to 2" in capsys.readouterr().err


def test_the_current_folder_is_not_replaced(
    tmp_path, chats, tokenizer_folder, capsys, monkeypatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for out in (".", "..", str(here)):
        words = [str(chats), "--tokenizer", str(tokenizer_folder), "--out", out]
        assert main(["prepare", *words, "--workers", "1"]) == 2
        said = capsys.readouterr().err
        assert f"{out} is the current folder, which cannot be replaced; give a folder in" in said
    assert not list(here.iterdir())


def test_inspect_refuses_what_is_no_store(tmp_path: Path, capsys) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is no token store" in capsys.readouterr().err
