"""What every test gets: a store and caches of the suite's own, and under the validation layer a failure for each fault.

``OAZOO_VALIDATION=1`` (``make test-validation``) runs the suite under the Khronos validation layer: the test during which
the layer speaks fails, and so does the run when a process that a test started made it speak.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VALIDATING = os.environ.get("OAZOO_VALIDATION", "") not in ("", "0")

# A job that a shell put into the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
for interruption in ("SIGINT", "SIGHUP"):
    number = getattr(signal, interruption, None)
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if interruption == "SIGINT" else signal.SIG_DFL)

# Neither the store of the person who runs the suite is touched, nor is a large file fetched again at every run.
os.environ["OAZOO_HOME"] = str(ROOT / "build" / "test-home")
# Choices of that person's shell that would change what tests see.
for name in (
    "OAZOO_OFFLINE",
    "OAZOO_DEBUG",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "NO_COLOR",
    "FORCE_COLOR",
):
    os.environ.pop(name, None)


def pytest_configure(config: pytest.Config) -> None:
    """Under the layer, name a file in which all processes of this run leave its messages."""
    if VALIDATING and "OAZOO_VALIDATION_LOG" not in os.environ:  # workers of pytest-xdist inherit it
        handle, path = tempfile.mkstemp(prefix="oazoo-validation-", suffix=".log")
        os.close(handle)
        os.environ["OAZOO_VALIDATION_LOG"] = path
        config.stash[_log] = Path(path)
        atexit.register(_check_the_end, Path(path))


def pytest_report_header(config: pytest.Config) -> str:
    """The device that the run is about to use, so that a log tells which driver passed."""
    from oazoo.runtime.probe import run_probe

    found = run_probe()
    name = found.device["driver"] if found.device is not None else found.detail
    return f"vulkan: {name}{', under the validation layer' if VALIDATING else ''}"


_log = pytest.StashKey[Path]()


def _read(path: Path) -> str:
    """What the layer said since the last look."""
    said = path.read_text("utf-8", errors="replace")
    path.write_text("")
    if said:
        print(f"\nThe Vulkan validation layer said, in this process or one that a test started:\n{said}")
    return said


def _check_the_end(path: Path) -> None:
    """Look once more after the device was closed: this was registered before it was opened, so it runs later."""
    said = _read(path)
    path.unlink()
    if said:
        sys.stdout.flush()
        os._exit(1)  # the exit status is settled by now, and this is the one way left to change it


@pytest.fixture(autouse=VALIDATING)
def validated() -> Iterator[None]:
    """Fail the test during which the validation layer complained."""
    from oazoo.runtime import validation_messages

    before = len(validation_messages())
    yield
    said = validation_messages()[before:]
    assert not said, "the Vulkan validation layer says:\n" + "\n".join(said)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run for messages of processes that tests started."""
    path = session.config.stash.get(_log, None)
    if path is not None and _read(path):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
