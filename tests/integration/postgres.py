"""A PostgreSQL of a test's own, run by an ordinary user: it refuses root."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.places import free_port, wait_for

__all__ = ["Postgres", "open_postgres"]

USER = "flows"


class Postgres:
    """A running server.

    Args:
        programs: Folder of initdb, postgres and createdb.
        folder: Its data.
        password: Of its one user.
    """

    def __init__(self, programs: Path, folder: Path, password: str) -> None:
        self.folder = folder
        self.password = password
        self.port = free_port()
        self._programs = programs

    def address(self, database: str, *, driver: str = "postgresql") -> str:
        """Return the address of a database, its password included."""
        return f"{driver}://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> bool:
        """Create a database; says whether the server did it."""
        words = ("--host=127.0.0.1", f"--port={self.port}", f"--username={USER}", database)
        environment = {**os.environ, "PGPASSWORD": self.password}
        command = [str(self._programs / "createdb"), *words]
        return subprocess.run(command, env=environment, capture_output=True).returncode == 0


@contextmanager
def open_postgres() -> Iterator[Postgres]:
    """Give an empty server on loopback; skips where PostgreSQL is not installed."""
    programs = _programs()
    as_user = _ordinary_user()
    folder = Path(tempfile.mkdtemp(prefix="dflash-postgres-"))
    shutil.chown(folder, **as_user) if as_user else None
    found = Postgres(programs, folder, secrets.token_urlsafe(24))
    password = folder / "password"
    password.write_text(found.password)
    shutil.chown(password, **as_user) if as_user else None
    data = folder / "data"
    subprocess.run(
        [
            *(str(programs / "initdb"), f"--pgdata={data}", f"--username={USER}", "--no-sync"),
            *("--auth=scram-sha-256", f"--pwfile={password}", "--encoding=UTF8", "--no-locale"),
        ],
        check=True,
        capture_output=True,
        cwd=folder,
        **_popen(as_user),
    )
    password.unlink()
    options = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
    process = subprocess.Popen(
        [
            *(str(programs / "postgres"), "-D", str(data), "-p", str(found.port)),
            *(word for option in options for word in ("-c", option)),
        ],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **_popen(as_user),
    )
    try:
        wait_for(lambda: found.create("prefect"), what="PostgreSQL")
        assert found.create("mlflow")
        yield found
    finally:
        process.send_signal(signal.SIGINT)  # SIGTERM would wait for whoever is still connected
        process.wait(120)
        shutil.rmtree(folder)


def _programs() -> Path:
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))
    on_path = shutil.which("initdb")
    if not known and on_path is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    return known[-1] if known else Path(str(on_path)).parent


def _ordinary_user() -> dict[str, str]:
    """Return nobody in particular when this is not root, else the user that the package made."""
    if os.geteuid() != 0:
        return {}
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("this is root and there is no user 'postgres' to run PostgreSQL as")
    return {"user": "postgres", "group": "postgres"}


def _popen(as_user: dict[str, str]) -> dict[str, Any]:
    return {**as_user, "extra_groups": []} if as_user else {}
