"""The standard-library chats: what is asked, what is answered, what is held out."""

import ast
from pathlib import Path

import pytest

from dflash_core.corpus.stdlib import functions_in, is_held_out, stdlib_functions
from dflash_core.errors import DataError

SOURCE = '''
class Box:
    @property
    def width(
        self,
        unit: str = ":",
    ) -> int:  # in pixels
        """Width.

        Of the box.
        """
        # not cached
        return self._width * 2

    def area(self):
        return self.width ** 2

def one_line(): "only a docstring"

def outer():
    """Outer."""
    def inner():
        return 1
    return inner
'''


def test_prompt_is_signature_and_docstring_and_answer_is_the_rest() -> None:
    width = next(functions_in(SOURCE, "boxes"))
    assert width.sample_id == "boxes:Box.width:4"
    assert width.prompt.startswith("def width(\n    self,\n") and "Of the box." in width.prompt
    assert width.source.endswith("# not cached\n    return self._width * 2")
    assert "Of the box." not in width.source


def test_functions_without_docstring_are_asked_by_their_signature() -> None:
    names = {function.sample_id.split(":")[1]: function for function in functions_in(SOURCE, "m")}
    assert set(names) == {"Box.width", "Box.area", "outer"}
    assert names["Box.area"].prompt == "def area(self):"


def test_source_that_does_not_parse_yields_nothing() -> None:
    assert list(functions_in("def broken(:\n", "m")) == []
    assert list(functions_in("x = '\0'", "m")) == []


def test_every_answer_of_the_real_library_parses_without_its_docstring() -> None:
    functions = list(stdlib_functions("held_out"))
    assert len(functions) > 100
    for function in functions:
        (node,) = ast.parse(function.source).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        assert function.docstring


def test_splits_share_no_module_and_skip_test_folders(tmp_path: Path) -> None:
    for module in ("argparse", "ipaddress", "json/__init__", "test/support"):
        file = tmp_path / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(SOURCE)
    modules = [
        {function.module for function in stdlib_functions(split, root=tmp_path)}
        for split in ("train", "held_out")
    ]
    assert modules == [{"argparse", "json"}, {"ipaddress"}]


def test_the_split_is_frozen() -> None:
    """The committed demo target was trained on this split: a change would leak held-out text."""
    assert [m for m in ("argparse", "ipaddress", "pprint", "json", "bz2") if is_held_out(m)] == [
        "ipaddress",
        "pprint",
        "bz2",
    ]


def test_a_library_without_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no Python source"):
        next(stdlib_functions("train", root=tmp_path))
