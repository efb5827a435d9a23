"""``python -m flows.cli``."""

import sys

from flows.cli import main

code = main()
# CPython remembers a Ctrl-C that came inside code made from text, as dataclasses are, even when it
# was caught, and would end by the signal; other such code makes it forget.
exec("")  # noqa: S102
sys.exit(code)
