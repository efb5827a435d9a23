"""Preparation: right counts, named rejects, the same bytes by any number of workers, restarts."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from dflash_core.corpus.config import CorpusConfig, PrepareConfig
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.preparing.assemble import Selection, find_leaks
from dflash_core.corpus.preparing.prepare import prepare_corpus, prepare_parts, prepare_store
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ArtifactError, ConfigError, DataError

ROOT = Path(__file__).parents[4]


def chat(question: str, answer: str = "a", **fields) -> dict:
    return {"question": question, "answer": answer, **fields}


def write(path: Path, rows) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def run(inputs, encoder, out: Path, *, workers: int = 1, **options):
    selection = options.pop("selection", Selection())
    config = PrepareConfig(**options)
    return prepare_store(inputs, encoder, out, config, workers=workers, selection=selection)


def written(encoder: ChatEncoder, file: Path) -> Path:
    """Write what a child process makes the encoder of."""
    file.write_text(json.dumps([encoder.to_json(), dict(encoder.variables)]))
    return file


def rejects(store: Path) -> list[tuple[str, int, str, str]]:
    lines = (store / "rejects.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return [(row["file"], row["line"], row["reason"], row["sample_id"]) for row in rows]


def file_bytes(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.iterdir())}


def test_rows_become_samples_and_bad_ones_are_named(tmp_path: Path, encoder) -> None:
    rows = [
        chat("1", id="one"),
        "{broken",
        {"messages": []},
        {"messages": [{"role": "user", "content": "only a prompt"}], "id": "p"},
        chat("lone \ud800 surrogate", id="l"),
        chat("6"),
    ]
    store = tmp_path / "store"
    report = run([write(tmp_path / "a.jsonl", rows)], encoder, store, max_reject_share=0.7)
    assert (report.num_rows, report.num_samples, report.num_rejects) == (6, 2, 4)
    assert TokenStore.open(store, verify=True).sample_ids == ["a/one", "a/6"]
    found = rejects(store)
    assert [(file, line, name) for file, line, _, name in found] == [
        ("a.jsonl", 2, ""),
        ("a.jsonl", 3, ""),
        ("a.jsonl", 4, "p"),
        ("a.jsonl", 5, "l"),
    ]
    for (_, _, reason, _), part in zip(
        found, ["not valid JSON", "empty list", "no assistant turn", "lone surrogate"], strict=True
    ):
        assert part in reason


def test_too_many_rejects_stop_with_a_sentence(tmp_path: Path, encoder) -> None:
    odd = [{"messages": [{"role": role, "content": "x"}]} for role in ("narrator", "judge")]
    path = write(tmp_path / "a.jsonl", [chat("1"), *odd])
    with pytest.raises(
        DataError,
        match=r"2 of 3 rows were refused \(66.7%\).*max_reject_share 0.05 .*the commonest of the "
        r"reasons \(2 rows\) is that .*a.jsonl.* unknown role 'narrator'",
    ):
        run([path], encoder, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert len((tmp_path / "s.rejects.jsonl").read_text().splitlines()) == 2


def test_exact_duplicates_are_left_out_and_counted(tmp_path: Path, encoder) -> None:
    one = write(tmp_path / "a.jsonl", [chat("q"), chat("r"), chat("q", id=7)])
    two = tmp_path / "b.json"
    two.write_text(
        json.dumps(
            [
                {
                    "messages": [
                        {"role": "user", "content": "q"},
                        {"role": "assistant", "content": "a"},
                    ]
                }
            ]
        )
    )
    report = run([one, two], encoder, tmp_path / "s")
    assert (report.num_samples, report.num_duplicates) == (2, 2)


def test_ids_that_occur_twice_get_a_number(tmp_path: Path, encoder) -> None:
    path = write(tmp_path / "a.jsonl", [chat(str(k), id="same") for k in range(3)])
    report = run([path], encoder, tmp_path / "s")
    assert report.num_renamed == 2
    assert TokenStore.open(tmp_path / "s").sample_ids == ["a/same", "a/same#2", "a/same#3"]


def test_cut_is_counted_in_tokens_and_supervised_tokens(tmp_path: Path, encoder) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q", "x " * 50), chat("r " * 60, "late"), chat("s")])
    whole = run([path], encoder, tmp_path / "whole")
    assert whole.num_truncated == 0
    report = run([path], encoder, tmp_path / "s", max_length=64, max_reject_share=0.5)
    kept, long = TokenStore.open(tmp_path / "s"), TokenStore.open(tmp_path / "whole")
    assert report.num_truncated == 1 and kept.lengths[0] == 64
    assert report.truncated_tokens == long.lengths[0] - 64
    assert report.truncated_supervised == long.supervised[0] - kept.supervised[0]
    assert "no supervised token within max_length 64" in rejects(tmp_path / "s")[0][2]


def test_oversize_samples_can_be_dropped(tmp_path: Path, encoder) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q", "x " * 50), chat("s")])
    report = run(
        [path],
        encoder,
        tmp_path / "s",
        max_length=64,
        oversize="drop",
        max_reject_share=0.5,
    )
    assert report.num_samples == 1 and "more than max_length 64" in rejects(tmp_path / "s")[0][2]


def test_text_and_token_rows_are_taken(tmp_path: Path, encoder, tokenizer) -> None:
    rows = [
        {"text": "plain <|im_end|> text"},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 999_999], "labels": [5, 999_999]},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    run([path], encoder, tmp_path / "s", max_reject_share=0.5)
    text, tokens = TokenStore.open(tmp_path / "s")
    assert tokenizer.decode(text.input_ids) == "plain <|im_end|> text" and text.loss_mask.all()
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in text.input_ids
    assert tokens.input_ids.tolist() == [5, 6, 7] and tokens.loss_mask.tolist() == [0, 1, 1]
    assert "token id 999999, outside" in rejects(tmp_path / "s")[0][2]


def test_one_very_long_turn_is_taken(tmp_path: Path, encoder) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q", "0" * 12_000), chat("r", "word " * 200_000)])
    run([path], encoder, tmp_path / "s", max_length=2_000_000)
    store = TokenStore.open(tmp_path / "s")
    assert store.supervised.min() > 1_000 and store.lengths.max() > 400_000


def test_formats_are_told_for_each_file(tmp_path: Path, encoder) -> None:
    mixed = write(tmp_path / "a.jsonl", [chat("q"), {"text": "t"}, {"prompt": "p", "output": "o"}])
    report = run([mixed], encoder, tmp_path / "s")
    assert report.formats == {"a.jsonl": {"instruction": 2, "text": 1}}


def test_files_of_one_name_are_told_apart(tmp_path: Path, encoder) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.jsonl", [chat(folder), "{broken"])
    report = run([tmp_path / "x", tmp_path / "y"], encoder, tmp_path / "s", max_reject_share=0.5)
    assert set(report.formats) == {"x/a.jsonl", "y/a.jsonl"}
    assert [file for file, *_ in rejects(tmp_path / "s")] == ["x/a.jsonl", "y/a.jsonl"]


def test_empty_file_is_named_and_the_rest_is_read(tmp_path: Path, encoder) -> None:
    (tmp_path / "empty.jsonl").touch()
    path = write(tmp_path / "a.jsonl", [chat(str(k)) for k in range(30)])
    run([path, tmp_path / "empty.jsonl"], encoder, tmp_path / "s")
    assert rejects(tmp_path / "s") == [("empty.jsonl", 0, "is empty", "")]


def test_nothing_left_is_refused_and_leaves_nothing(tmp_path: Path, encoder) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="no sample is left"):
        run([tmp_path / "empty.jsonl"], encoder, tmp_path / "s", max_reject_share=1.0)
    assert not (tmp_path / "s").exists()


def test_folder_gives_what_its_encoder_gives(tmp_path: Path, encoder, tokenizer_folder) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q"), chat("r")])
    run([path], encoder, tmp_path / "one")
    run([path], tokenizer_folder, tmp_path / "two")
    assert (
        file_bytes(tmp_path / "one")["shard-00000.arrow"]
        == (file_bytes(tmp_path / "two")["shard-00000.arrow"])
    )


def test_folder_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q")])
    with pytest.raises(ConfigError, match="there is no tokenizer folder"):
        run([path], tmp_path / "none", tmp_path / "s")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(ConfigError, match=r"no token for 'a', its vocabulary is 1 long; put the"):
        run([path], bare, tmp_path / "s")
    with pytest.raises(ConfigError, match="holds no usable tokenizer"):
        run([path], tmp_path, tmp_path / "s")


def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, encoder) -> None:
    rows = [chat(f"question {k}", "answer " * (k % 9 + 1)) for k in range(1_300)]
    rows[700] = "{broken"
    path = write(tmp_path / "a.jsonl", rows)
    progress: list[tuple[int, int]] = []
    one = run([path], encoder, tmp_path / "one")
    three = prepare_store(
        [path],
        encoder,
        tmp_path / "three",
        PrepareConfig(),
        workers=3,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert file_bytes(tmp_path / "one").keys() == file_bytes(tmp_path / "three").keys()
    assert file_bytes(tmp_path / "one") == file_bytes(tmp_path / "three")
    assert one.num_samples == three.num_samples == 1_299
    assert progress[-1] == (path.stat().st_size, path.stat().st_size)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_workers_get_an_encoder_of_any_size_and_variables(tmp_path: Path, tokenizer) -> None:
    """All but the variables by a file: a pipe would hold but 64 KiB, and JSON no dates."""
    source = tokenizer.chat_template + "{{ today.year }}{# " + "long " * 20_000 + "#}"
    variables = {"today": date(2026, 1, 2)}
    encoder = ChatEncoder(tokenizer, chat_template=source, template_variables=variables)
    path = write(tmp_path / "a.jsonl", [chat(f"question {k}") for k in range(3)])
    for name, workers in (("one", 1), ("two", 2)):
        run([path], encoder, tmp_path / name, workers=workers)
    assert file_bytes(tmp_path / "one") == file_bytes(tmp_path / "two")


def test_held_out_conversations_and_trees_are_left_out(tmp_path: Path, encoder) -> None:
    def tree(name, *answers):
        replies = [{"text": text, "role": "assistant"} for text in answers]
        root = {"text": name, "role": "prompter", "message_id": name, "replies": replies}
        return {"message_tree_id": name, "prompt": root}

    held = write(tmp_path / "held.jsonl", [chat("known"), tree("t1", "x")])
    train = write(tmp_path / "train.jsonl", [chat("known"), chat("new"), tree("t1", "y", "z")])
    run([held], encoder, tmp_path / "held")
    run([train], encoder, tmp_path / "all")
    leaks = find_leaks(TokenStore.open(tmp_path / "all"), TokenStore.open(tmp_path / "held"))
    assert leaks.tolist() == [0, 2, 3]
    report = run(
        [train],
        encoder,
        tmp_path / "train",
        selection=Selection(held_out_store=tmp_path / "held"),
    )
    assert (report.num_leaks, report.num_samples) == (3, 1)
    assert TokenStore.open(tmp_path / "train").sample_ids == ["train/2"]


def test_corpus_is_split_by_content_without_leaks(tmp_path: Path, encoder) -> None:
    path = write(tmp_path / "a.jsonl", [chat(str(k)) for k in range(400)])
    config = CorpusConfig(inputs=(path,), held_out_percent=25, max_held_out=50, max_samples=200)
    prepare_corpus(config, encoder, train=tmp_path / "t", held_out=tmp_path / "h", workers=1)
    train, held = TokenStore.open(tmp_path / "t"), TokenStore.open(tmp_path / "h")
    assert len(train) == 200 and len(held) == 50
    assert find_leaks(train, held).size == 0
    assert not set(train.sample_ids) & set(held.sample_ids)


def test_killed_run_goes_on_and_gives_the_same_bytes(tmp_path: Path, encoder) -> None:
    rows = [chat(f"question {k}", "answer " * 40) for k in range(2_600)]
    path = write(tmp_path / "a.jsonl", rows)
    program = (
        "import json, signal, sys; from pathlib import Path\n"
        "from dflash_core.corpus.masking.encoder import ChatEncoder\n"
        "from dflash_core.corpus.preparing.prepare import prepare_store\n"
        "from dflash_core.corpus.config import PrepareConfig\n"
        "a = sys.argv; work = Path(a[4])\n"
        "def end_soon(done, total):\n"
        "    if len(list(work.glob('part-*.arrow'))) == 2:\n"
        "        signal.setitimer(signal.ITIMER_PROF, 0.02)\n"
        "encoder = ChatEncoder.from_json(*json.loads(Path(a[2]).read_text()))\n"
        "given = [Path(a[1])], encoder, Path(a[3]), PrepareConfig()\n"
        "prepare_store(*given, workers=1, on_progress=end_soon)\n"
    )
    killed, made_of = tmp_path / "killed", written(encoder, tmp_path / "encoder.json")
    work = tmp_path / ".killed.prepare"
    arguments = [sys.executable, "-c", program, *map(str, (path, made_of, killed, work))]
    # The kernel ends it, as SIGKILL does, after so much work of its own: within the third part.
    assert subprocess.run(arguments, cwd=ROOT).returncode == -signal.SIGPROF
    assert not killed.exists()
    parts = {part: part.stat().st_mtime_ns for part in work.glob("part-*.arrow")}
    assert len(parts) >= 2
    times: dict[Path, int] = {}
    prepare_store(
        [path],
        encoder,
        killed,
        PrepareConfig(),
        workers=1,
        on_progress=lambda done, total: times.update(
            {part: part.stat().st_mtime_ns for part in work.glob("part-*.arrow")}
        ),
    )
    assert {part: times[part] for part in parts} == parts
    run([path], encoder, tmp_path / "whole")
    assert file_bytes(killed) == file_bytes(tmp_path / "whole")


def test_other_settings_do_not_take_up_old_parts(tmp_path: Path, encoder) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q", "x " * 50), "{broken"])
    with pytest.raises(DataError, match="max_reject_share"):
        run([path], encoder, tmp_path / "s")
    run([path], encoder, tmp_path / "s", max_length=32, max_reject_share=0.5)
    assert TokenStore.open(tmp_path / "s").lengths.tolist() == [32]


def test_full_disk_is_told_and_nothing_is_lost(tmp_path: Path, encoder) -> None:
    """A file-size limit stands in for the full disk: both fail a write with an OS error."""
    path = write(
        tmp_path / "a.jsonl", [chat(f"question {k}", "answer " * 40) for k in range(1_200)]
    )
    made_of = written(encoder, tmp_path / "encoder.json")
    program = (
        "import json, resource, sys; from pathlib import Path\n"
        "from dflash_core.corpus.masking.encoder import ChatEncoder\n"
        "from dflash_core.corpus.preparing.prepare import prepare_store\n"
        "from dflash_core.corpus.config import PrepareConfig\n"
        "from dflash_core.errors import DFlashError\n"
        "a = sys.argv; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "encoder = ChatEncoder.from_json(*json.loads(Path(a[2]).read_text()))\n"
        "try: prepare_store([Path(a[1])], encoder, Path(a[3]), PrepareConfig(), workers=1)\n"
        "except DFlashError as error: print(error)\n"
    )
    arguments = [sys.executable, "-c", program, str(path), str(made_of)]
    result = subprocess.run(
        [*arguments, str(tmp_path / "s")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "cannot be written: File too large; free some space" in result.stdout
    assert not (tmp_path / "s").exists()
    report = run([path], encoder, tmp_path / "s")
    assert report.num_samples == 1_200


@pytest.mark.parametrize("when", ["at once", "later"])
def test_killed_worker_is_told_while_it_is_written_to(tmp_path: Path, tokenizer, when) -> None:
    """At once its arguments wait in a pipe, later rows; untold, whoever writes waits for ever."""
    path = write(tmp_path / "a.jsonl", [chat("q", "answer " * 400) for _ in range(8_000)])
    program = tmp_path / "program.py"
    source = tokenizer.chat_template + "{# " + "long " * 20_000 + "#}"  # no pipe holds so much
    encoder = ChatEncoder(tokenizer, chat_template=source)
    made_of = written(encoder, tmp_path / "encoder.json")
    program.write_text(
        "import json, os, signal, sys, threading, time\n"
        "from multiprocessing import active_children\n"
        "from pathlib import Path\n"
        "def kill():\n"
        "    while not (workers := active_children()): time.sleep(0.01)\n"
        "    os.kill(workers[0].pid, signal.SIGKILL)\n"
        "if __name__ == '__mp_main__' and sys.argv[4] == 'at once': os._exit(1)\n"
        "if __name__ == '__main__':\n"
        "    from dflash_core.corpus.config import PrepareConfig\n"
        "    from dflash_core.corpus.masking.encoder import ChatEncoder\n"
        "    from dflash_core.corpus.preparing.prepare import prepare_store\n"
        "    from dflash_core.errors import DFlashError\n"
        "    a = sys.argv\n"
        "    encoder = ChatEncoder.from_json(*json.loads(Path(a[2]).read_text()))\n"
        "    if a[4] == 'later': threading.Thread(target=kill).start()\n"
        "    try: prepare_store([Path(a[1])], encoder, Path(a[3]), PrepareConfig(), workers=2)\n"
        "    except DFlashError as error: print(error)\n"
    )
    arguments = [sys.executable, str(program), str(path), str(made_of), str(tmp_path / "s"), when]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    assert re.search(r"a tokenising worker died while \d+ parts were done", result.stdout)


def test_row_nested_too_deeply_is_refused_and_the_rest_goes_on(tmp_path: Path, encoder) -> None:
    deep = '{"question": "q", "answer": "a", "tools": [{"x": ' + "[" * 990 + "]" * 990 + "}]}"
    deeper = '{"question": ' + "[" * 100_000
    path = write(tmp_path / "a.jsonl", [chat("q"), deep, deeper])
    run([path], encoder, tmp_path / "s", max_reject_share=0.7)
    assert TokenStore.open(tmp_path / "s").sample_ids[0] == "a/1"
    assert rejects(tmp_path / "s")[-1][1] == 3


def test_ids_like_those_of_renamed_ones_stay_unique(tmp_path: Path, encoder) -> None:
    names = ["x", "x", "x#2", "x"]
    path = write(tmp_path / "a.jsonl", [chat(str(k), id=name) for k, name in enumerate(names)])
    run([path], encoder, tmp_path / "s")
    ids = TokenStore.open(tmp_path / "s").sample_ids
    assert len(set(ids)) == 4 and ids[0] == "a/x"


def test_folder_that_is_no_store_is_not_replaced(tmp_path: Path, encoder) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q")])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for out in (tmp_path / "mine", path):
        with pytest.raises(ArtifactError, match="is no token store, so it is not replaced"):
            run([path], encoder, out)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_two_runs_of_one_store_do_not_meet(tmp_path: Path, encoder) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q")])
    with (
        prepare_parts([path], encoder, tmp_path / "s", PrepareConfig(), workers=1),
        pytest.raises(DataError, match="another process is preparing the same store"),
    ):
        run([path], encoder, tmp_path / "s")


def test_run_that_ends_while_another_begins_leaves_the_other_alone(
    tmp_path: Path, encoder, monkeypatch
) -> None:
    """It removes the folder between the other's opening of the lock and its locking it."""
    path, flock = write(tmp_path / "a.jsonl", [chat("q")]), fcntl.flock

    def end_before(lock: IO[str], how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        shutil.rmtree(tmp_path / ".s.prepare")
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", end_before)
    with (
        prepare_parts([path], encoder, tmp_path / "s", PrepareConfig(), workers=1),
        pytest.raises(DataError, match="another process is preparing the same store"),
    ):
        run([path], encoder, tmp_path / "s")


def test_masks_in_the_store_are_those_of_the_encoder(tmp_path: Path, encoder, tokenizer) -> None:
    rows = [chat(f"q{k}", f" answer {k}\n") for k in range(20)]
    run([write(tmp_path / "a.jsonl", rows)], encoder, tmp_path / "s")
    for row, item in zip(rows, TokenStore.open(tmp_path / "s"), strict=True):
        ids = item.input_ids[np.flatnonzero(item.loss_mask)]
        assert tokenizer.decode(ids) == row["answer"] + "<|im_end|>"
