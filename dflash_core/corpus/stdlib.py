"""Chats from the Python standard library: signature and docstring ask, the source answers.

Always at hand, real, and of heavy-tailed length. Modules are held out by a hash of their name, so
the split is the same on every machine and Python version, whatever functions a patch release adds.
"""

import ast
import hashlib
import inspect
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_core.artifacts import atomic_write
from dflash_core.errors import DataError

__all__ = [
    "Split",
    "StdlibFunction",
    "functions_in",
    "is_held_out",
    "stdlib_functions",
    "write_stdlib_chats",
]

Split = Literal["train", "held_out"]

# Code that is generated, vendored or test data is not what a reader would call the library.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test", "lib2to3"}
)
HELD_OUT_PERCENT = 6


@dataclass(frozen=True)
class StdlibFunction:
    """One function or method.

    Attributes:
        sample_id: ``module:qualified.name``.
        module: Dotted module name, the unit of the split.
        signature: Its ``def`` line or lines, dedented, without the trailing colon's body.
        docstring: Cleaned docstring; empty when it has none.
        source: Its source, dedented, without the docstring.
    """

    sample_id: str
    module: str
    signature: str
    docstring: str
    source: str

    @property
    def prompt(self) -> str:
        """What the user asks: the signature, then the docstring in quotes."""
        if not self.docstring:
            return self.signature
        body = "\n".join(f"    {line}".rstrip() for line in self.docstring.splitlines())
        return f'{self.signature}\n    """\n{body}\n    """'


def is_held_out(module: str) -> bool:
    """Say whether a module is kept out of every training set."""
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def stdlib_functions(
    split: Split, *, documented_only: bool = True, root: Path | None = None
) -> Iterator[StdlibFunction]:
    """Yield the functions of one split, in the order of their files and lines.

    Args:
        split: Which modules.
        documented_only: Leave out functions without a docstring.
        root: Library folder; the running interpreter's when not given.

    Raises:
        DataError: The library's source is not there.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    )
    if not files:
        raise DataError(
            f"{root} holds no Python source; install the standard library's .py files or set "
            "corpus.source to 'files'"
        )
    for path in files:
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if is_held_out(module) == (split == "held_out"):
            text = path.read_text(encoding="utf-8", errors="replace")
            for function in functions_in(text, module):
                if function.docstring or not documented_only:
                    yield function


def functions_in(text: str, module: str) -> Iterator[StdlibFunction]:
    """Yield the functions of one module's source, the nested ones as part of their parent only.

    Source that this interpreter cannot parse (templates, other versions) yields nothing.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for name, node in _definitions(tree, prefix=""):
        function = _describe(node, name, module, lines)
        if function is not None:
            yield function


def _definitions(
    tree: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{prefix}{node.name}.")


def _describe(
    node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, module: str, lines: list[str]
) -> StdlibFunction | None:
    docstring = ast.get_docstring(node, clean=True) or ""
    body = node.body[1:] if docstring else node.body
    if not body:
        return None
    signature = _dedent(lines[node.lineno - 1 : _signature_end(node, lines)])
    # Comments between docstring and first statement belong to the answer.
    start = (node.body[0].end_lineno or 0) if docstring else _signature_end(node, lines)
    rest = lines[start : node.end_lineno]
    if start == node.body[-1].end_lineno:
        return None  # a one-line function: nothing is left to answer
    source = _dedent([*lines[node.lineno - 1 : _signature_end(node, lines)], *rest])
    return StdlibFunction(f"{module}:{name}:{node.lineno}", module, signature, docstring, source)


def _signature_end(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Return the line number on which the signature's colon stands."""
    first = node.body[0]
    line = first.lineno
    if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        line = min([line, *(decorator.lineno for decorator in first.decorator_list)])
    end = line - 1
    while end > node.lineno and not lines[end - 1].split("#")[0].rstrip().endswith(":"):
        end -= 1
    return max(end, node.lineno)


def _dedent(lines: list[str]) -> str:
    return inspect.cleandoc("\n" + "\n".join(line.rstrip() for line in lines)).rstrip()


def write_stdlib_chats(
    file: Path, split: Split, *, most: int | None = None, documented_only: bool = True
) -> int:
    """Write one split's functions as chats, one JSON object a line.

    Args:
        file: Where; written whole or not at all.
        split: Which modules. A held-out function that some training module repeats is left out.
        most: Most functions, those with the smallest hash of their id; all when not given.
        documented_only: Leave out functions without a docstring.

    Returns:
        Functions written.

    Raises:
        DataError: The library's source is not there.
    """
    functions = list(stdlib_functions(split, documented_only=documented_only))
    if split == "held_out":
        trained_on = {f.source for f in stdlib_functions("train", documented_only=False)}
        functions = [f for f in functions if f.source not in trained_on]
    if most is not None and len(functions) > most:
        # By hash, so that functions which another Python version adds disturb few of the others.
        functions.sort(key=lambda f: hashlib.sha256(f.sample_id.encode()).digest())
        functions = sorted(functions[:most], key=lambda f: f.sample_id)
    rows = (
        {
            "id": function.sample_id,
            "domain": "python-stdlib",
            "messages": [
                {"role": "user", "content": function.prompt},
                {"role": "assistant", "content": function.source},
            ],
        }
        for function in functions
    )
    atomic_write(file, "".join(f"{json.dumps(row)}\n" for row in rows))
    return len(functions)
