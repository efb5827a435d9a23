"""Real servers and workers on loopback, in a folder and on ports of their own."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

from configs.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
POOL = "dflash"
# What the test session sets for its own Prefect, or the machine for somebody else's.
FOREIGN = ("PREFECT_", "MLFLOW_", "DFLASH_")
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "NO_COLOR": "1",
    "COLUMNS": "400",
}


class Place:
    """One machine of a team: its environment, its processes, its shell.

    Args:
        folder: Everything is written here.
        environment: Variables of every process.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        port = free_port()
        self.api_url = f"http://127.0.0.1:{port}/api"
        own = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        self.env = {
            **own,
            **SETTINGS,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_API_URL": self.api_url,
            **environment,
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *command: str, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a Python module in the background; its output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env={**self.env, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def start_server(self) -> None:
        """Start the Prefect server and wait until it answers."""
        self.server = self.start("server", "prefect", "server", "start")
        self.wait_for_server()

    def wait_for_server(self) -> None:
        """Return when the Prefect server answers."""
        wait_for(lambda: answers(f"{self.api_url}/health"), what="a Prefect server")

    def start_worker(self) -> None:
        """Start a worker of the pool."""
        self.worker = self.start("worker", "prefect", "worker", "start", "--pool", POOL)

    def shell(self, *arguments: str, code: int = 0) -> str:
        """Run ``prefect`` as a user would, expect an exit code, and return what it printed."""
        (said,) = self.shells(arguments, code=code)
        return said

    def shells(self, *commands: Sequence[str], code: int = 0) -> list[str]:
        """Run several commands at the same time; see `shell`."""
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for arguments in commands
        ]
        said = [process.communicate(timeout=600)[0] for process in running]
        for process, arguments, text in zip(running, commands, said, strict=True):
            assert process.returncode == code, f"{arguments[:3]} gave {process.returncode}:\n{text}"
        return said

    def set_up(self) -> None:
        """Make the pool, the limit and all deployments on a server that was started."""
        pool = ("work-pool", "create", POOL, "--type", "process")
        self.shells(pool, ("gcl", "create", "gpu-pool", "--limit", "1"))
        self.shell("deploy", "--all")

    def run(self, deployment: str, settings: Settings, name: str, *more: str, code: int = 0) -> str:
        """Run a deployment with these settings; ``--watch`` in `more` waits for its end."""
        parameter = f"settings={settings.model_dump_json()}"
        words = ("--param", parameter, "--flow-run-name", name, *more)
        return self.shell("deployment", "run", deployment, *words, code=code)

    def ask(self, path: str, **body: Any) -> Any:
        """Ask the server; a body makes it a POST.

        A server whose database is locked says 503, which Prefect's own clients ask again too.
        """
        request = urllib.request.Request(  # noqa: S310
            f"{self.api_url}{path}",
            data=json.dumps(body).encode() if body else None,
            headers={"Content-Type": "application/json"},
        )

        def once() -> tuple[Any] | None:
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
                    return (json.load(answer),)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                        raise
                return None

        (found,) = wait_for(once, what="an answer")
        return found

    def flow_runs(self, **where: Any) -> list[dict[str, Any]]:
        """Return flow runs, oldest first."""
        return self.ask("/flow_runs/filter", sort="START_TIME_ASC", **where)

    def flow_run(self, name: str) -> dict[str, Any]:
        """Return the flow run of a name."""
        (found,) = self.flow_runs(flow_runs={"name": {"any_": [name]}})
        return found

    def state(self, name: str) -> str:
        """Return the name of a flow run's state."""
        return self.flow_run(name)["state"]["name"]

    def logs(self, name: str) -> str:
        """Return what a flow run and its tasks logged."""
        where = {"flow_run_id": {"any_": [self.flow_run(name)["id"]]}}
        lines: list[str] = []
        while page := self.ask("/logs/filter", logs=where, limit=200, offset=len(lines)):
            lines += [line["message"] for line in page]
        return "\n".join(lines)

    def close(self) -> None:
        """End every process, the youngest first."""
        for process in reversed(self._processes):
            end(process)


@contextmanager
def open_place(folder: Path, **environment: str) -> Iterator[Place]:
    """Give a place, and leave no process of it."""
    place = Place(folder, **environment)
    try:
        yield place
    finally:
        place.close()


def end(process: "subprocess.Popen[bytes]", number: signal.Signals = signal.SIGTERM) -> None:
    """End a process with its group."""
    if process.poll() is None:
        os.killpg(process.pid, number)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Return a port that nobody listens on, below those that the kernel deals out.

    One of those may be dealt to somebody else before it is bound, or while its server is away.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def answers(url: str) -> bool:
    """Say whether a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310
            return True
    except (urllib.error.URLError, OSError):
        return False


def wait_for(
    condition: Callable[[], Any], *, timeout_s: float = 240.0, what: str = "a condition"
) -> Any:
    """Return the first true value of a condition."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.3)
    return found


def processes_with(*texts: str) -> list[psutil.Process]:
    """Return the live processes, this one apart, with a text among arguments or variables."""
    found = []
    for process in psutil.process_iter():
        # Some end while they are looked at; what waits to be collected has no arguments any more.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(t in word for t in texts for word in words):
                found.append(process)
    return found


def listening_on(process: "subprocess.Popen[bytes]") -> set[str]:
    """Return the addresses that a process and its children listen on."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return {
        connection.laddr.ip
        for member in family
        for connection in member.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


@contextmanager
def paused(run_dir: Path) -> Iterator[None]:
    """Hold the ranks of a training, so that servers come and go before its end, however fast."""
    held = processes_with(str(run_dir))
    for process in held:
        process.suspend()
    try:
        yield
    finally:
        for process in held:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def steps_done(run_dir: Path) -> int:
    """Return how many steps a training has written down."""
    file = run_dir / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.is_file() else 0
