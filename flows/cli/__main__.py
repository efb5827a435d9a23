"""``python -m flows.cli``."""

import sys

from flows.cli import main

sys.exit(main())
