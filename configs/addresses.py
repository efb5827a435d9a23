"""Addresses that may hold a password, and how they may be shown."""

import re

__all__ = ["without_secrets"]

# What accepts addresses cuts them differently, and some take a password with a slash in it as it
# is: everything up to the last @ counts, as it does for SQLAlchemy.
PASSWORD = re.compile(r"(//[^/:\s]*):\S*@")
# Drivers take it among the options too.
OPTION = re.compile(
    r"([?&;][^=&;#\s]*(?:password|passwd|pwd|token|secret|odbc_connect)[^=&;#\s]*)=[^&#\s]+", re.I
)


def without_secrets(text: str) -> str:
    """Return a text with the passwords of its addresses hidden.

    Example:
        >>> without_secrets("postgresql://me:a/b@db/x?sslmode=require&password=c")
        'postgresql://me:***@db/x?sslmode=require&password=***'
    """
    return OPTION.sub(r"\1=***", PASSWORD.sub(r"\1:***@", text))
