"""The house rules as tests: one direction, light imports, exact exports, small files."""

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIGHT_ROOMS = ("profiling", "bucketing", "planning", "throughput")
HEAVY = ("torch", "transformers", "prefect", "mlflow")
MOST_LINES = 400
MOST_FUNCTION_LINES = 70
MOST_MEDIAN = 150


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


TREES = {
    file: ast.parse(file.read_text())
    for file in sources("dflash_core", "flows", "tasks", "configs")
}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def outer_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, without those inside functions."""
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        yield from (n for n in inside if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_import_contracts_hold() -> None:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_light_rooms_leave_heavy_packages_unloaded() -> None:
    rooms = "; ".join(f"import dflash_core.{room}" for room in LIGHT_ROOMS)
    code = f"{rooms}; import sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_command_line_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, flows.cli\n"
        "try: flows.cli.main(['--help'])\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_all_is_exact() -> None:
    """Exported names exist, each once; rooms of the core export all that they re-export."""
    for file, tree in TREES.items():
        exported = exports(tree)
        assert set(exported) <= names_in(tree), file
        assert len(set(exported)) == len(exported), file
        if file.name == "__init__.py" and file.parent.parent == ROOT / "dflash_core":
            assert imported_from_home(tree) <= set(exported), file


def test_files_stay_small() -> None:
    long = {name_of(file): n for file in TREES if (n := num_lines(file)) > MOST_LINES}
    assert not long
    assert statistics.median(num_lines(file) for file in sources("dflash_core")) <= MOST_MEDIAN
    assert not [file for file in TREES if file.name == "utils.py"]


def test_functions_stay_small() -> None:
    long = {
        f"{name_of(file)}:{node.name}": n
        for file, tree in TREES.items()
        for node in functions(tree)
        if (n := body_lines(node)) > MOST_FUNCTION_LINES
    }
    assert not long


def test_public_functions_name_their_arguments() -> None:
    catch_all = [
        f"{name_of(file)}:{node.name}"
        for file, tree in TREES.items()
        for node in outer_functions(tree)
        if node.args.kwarg is not None and not node.name.startswith("_")
    ]
    assert not catch_all


def test_only_ranks_and_tools_read_the_environment() -> None:
    """The core takes settings as arguments; torchrun's variables are read where ranks join."""
    readers = [
        name_of(file)
        for file in sources("dflash_core")
        if re.search(r"os\.(environ\.get|getenv)", file.read_text())
    ]
    assert all(reader.startswith("dflash_core/training/") for reader in readers), readers


def exports(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return list(ast.literal_eval(node.value))
    return []


def names_in(tree: ast.Module) -> set[str]:
    """Names that a module defines or imports anywhere."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def imported_from_home(tree: ast.Module) -> set[str]:
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dflash_core")
        for alias in node.names
    }


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines
