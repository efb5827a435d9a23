"""The command line ``dflash-flow``: one module per command, one boundary for errors.

A command module has ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(arguments) -> int``.
One with ``TAKES_SETTINGS = True`` finds ``--section.field value`` words in ``arguments.overrides``.
It is imported only when it is called, so that light commands start in milliseconds.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from dflash_core.errors import DFlashError
from flows.cli.interrupts import EXIT_INTERRUPTED, INTERRUPTS

__all__ = ["COMMANDS", "EXIT_FAILED", "EXIT_INPUT", "EXIT_INTERRUPTED", "EXIT_REJECTED", "main"]

EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_REJECTED = 3
USERS_PATH = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)

COMMANDS: dict[str, str] = {
    "prepare": "tokenise chat files into a token store",
    "inspect": "show samples of a token store",
    "profile": "sequence lengths of token data",
    "plan": "compare batching strategies on lengths",
    "calibrate": "measure what a micro-batch costs on this machine",
    "train": "train under torchrun",
    "join": "take part in a run of several machines",
    "watch": "follow a training run",
    "evaluate": "acceptance length of a drafter by speculative decoding",
    "export": "write a checkpoint in a layout that servers load",
    "convert": "write a GGUF file as a target folder",
    "report": "write the page of a finished run again",
    "runs": "list recorded runs",
    "run": "the whole chain",
    "demo": "the whole chain on the built-in example",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; without arguments given as the program, which answers interrupts.

    Returns:
        0 done, 1 failed, 2 bad input, 3 rejected by the gate, 4 interrupted and resumable.
    """
    if argv is None:
        INTERRUPTS.listen()
    arguments = list(sys.argv[1:] if argv is None else argv)
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="dflash-flow",
        usage="dflash-flow COMMAND [options]",
        epilog="commands:\n" + "\n".join(f"  {n:{width}}  {h}" for n, h in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND")
    name = parser.parse_args(arguments[:1]).command
    code = _bounded(name, arguments[1:])
    if code and INTERRUPTS.asked:
        code = EXIT_INTERRUPTED
    INTERRUPTS.end(code)
    return code


def _bounded(name: str, arguments: list[str]) -> int:
    """Run a command and turn what it raises into a sentence and a code."""
    try:
        code = _run(name, arguments)
        sys.stdout.flush()
        return code
    except DFlashError as error:
        return _fail(str(error), error.exit_code)
    except ValidationError as error:
        return _fail(first_problem(error), EXIT_INPUT)
    except json.JSONDecodeError as error:
        return _fail(f"not JSON: {error}", EXIT_INPUT)
    except KeyboardInterrupt as error:
        return _fail(str(error) or "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader has seen enough
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        where = f"{error.filename} cannot be used" if error.filename else "the output ended"
        return _fail(
            f"{where}: {error.strerror or error}",
            EXIT_INPUT if isinstance(error, USERS_PATH) else EXIT_FAILED,
        )
    except Exception:
        if not INTERRUPTS.asked:
            raise
        return _fail("interrupted", EXIT_INTERRUPTED)  # which some libraries make another error of


def _run(name: str, arguments: list[str]) -> int:
    """Import a command, which may take seconds, and run it."""
    module = importlib.import_module(f"flows.cli.{name}")
    command = argparse.ArgumentParser(prog=f"dflash-flow {name}", description=COMMANDS[name])
    module.add_arguments(command)
    parsed, rest = command.parse_known_args(arguments)
    # Commands that read settings take --section.field words, which their loader checks.
    if getattr(module, "TAKES_SETTINGS", False):
        parsed.overrides = rest
    elif rest:
        command.error(f"unrecognized arguments: {' '.join(rest)}")
    INTERRUPTS.begin()
    return module.run(parsed)


def first_problem(error: ValidationError) -> str:
    """Return one sentence for a settings error: the setting, the rule, the value."""
    problem = error.errors(include_url=False)[0]
    setting = ".".join(str(part) for part in problem["loc"]) or "settings"
    message = str(problem["msg"]).removeprefix("Value error, ")
    more = error.error_count() - 1
    tail = f" (and {more} more)" if more else ""
    if problem["type"] == "extra_forbidden":
        return f"unknown setting '{setting}'{tail}"
    if problem["type"] == "value_error":
        return f"{setting}: {message}{tail}"
    return f"{setting}: {message} (got {problem['input']!r}){tail}"


def _discard_output() -> None:
    """Let what is left in the buffer of standard output go nowhere when the program ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, code: int) -> int:
    sys.stderr.write(f"dflash-flow: {sentence}\n")
    return code
