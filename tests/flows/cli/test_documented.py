"""What README and docs tell people to type is what the parsers take."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from configs.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^(?:\.venv/bin/)?dflash-flow ([^#\n]+)", re.MULTILINE)
LINES = [line for page in PAGES for line in COMMAND.findall(page.read_text())]


@pytest.mark.parametrize("line", LINES)
def test_a_documented_command_is_taken(line: str) -> None:
    name, *words = shlex.split(line)
    module = importlib.import_module(f"flows.cli.{name}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    parsed, rest = parser.parse_known_args(words)
    settings = [word.partition("=")[0] for word in rest if word.startswith("--")]
    for word in settings:
        section = getattr(module, "ALIASES", {}).get(word, word).lstrip("-").partition(".")[0]
        assert section in Settings.model_fields, word
    assert not settings or module.TAKES_SETTINGS
    assert getattr(parsed, "layout", None) != "speculators" or parsed.target is not None
