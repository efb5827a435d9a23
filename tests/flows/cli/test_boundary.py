"""How the command line ends when its reader goes, or when it is interrupted early."""

import subprocess
import sys
from pathlib import Path

import pytest

import flows.cli
from flows.cli import EXIT_INTERRUPTED, main
from tasks.terminal import Terminal

ROOT = Path(__file__).parents[3]


def test_ctrl_c_while_a_command_is_imported_is_an_interruption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(flows.cli.importlib, "import_module", interrupted)
    assert main(["evaluate"]) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "dflash-flow: interrupted\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_seen_enough_is_no_failure(stream: str) -> None:
    code = (
        "import sys, flows.cli, flows.cli.convert as command\n"
        "from tasks.terminal import Terminal\n"
        f"command.run = lambda _: Terminal(stderr={stream == 'stderr'}).print('a' * 70_000) or 0\n"
        "sys.stdin.read(1)\n"  # until the reader has gone
        "sys.exit(flows.cli.main(['convert', 'x', '--out', 'y']))\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    gone, left = (program.stdout, program.stderr)[:: 1 if stream == "stdout" else -1]
    assert program.stdin and gone and left
    gone.close()
    program.stdin.write(b"x")
    program.stdin.close()
    with left:
        assert left.read() == b""
    assert program.wait() == 0


def test_styles_of_our_own_go_on_working() -> None:
    from rich.text import Text

    terminal = Terminal(width=20)
    with terminal.capture() as shown:
        terminal.print(Text("bold", style="bold"), "[b]plain[/b]")
    assert shown.get() == "bold [b]plain[/b]\n"
