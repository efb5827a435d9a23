"""The one kind of console that the command line writes on."""

import os

from rich.console import Console

__all__ = ["Terminal"]


class Terminal(Console):
    """Shows text as it is: brackets and colons of users' names are no markup and no emoji.

    When the reader of standard output has gone, `BrokenPipeError` says so; when that of standard
    error has, the work goes on unseen.
    """

    def __init__(
        self, *, stderr: bool = False, soft_wrap: bool = False, width: int | None = None
    ) -> None:
        super().__init__(
            stderr=stderr,
            soft_wrap=soft_wrap,
            width=width,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def on_broken_pipe(self) -> None:
        """Leave it to the command line's boundary; Rich would end with exit code 1."""
        if not self.stderr:
            raise BrokenPipeError
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
