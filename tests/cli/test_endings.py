"""How a command ends when its streams are closed or full, and when it is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and descriptors")

OAZOO = [sys.executable, "-m", "oazoo"]
WAITS = """
import sys, time
from oazoo.cli.common import run_and_exit
from oazoo.formats.atomic import atomic_file

def call():
    with atomic_file(sys.argv[1]) as file:
        file.write(b"half")
        print("ready", flush=True)
        time.sleep(60)

run_and_exit(call)
"""


def closing(*numbers: int, command: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with these standard streams closed."""
    closed = " ".join(f"{number}>&-" for number in numbers)
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *command]
    return subprocess.run(shell, capture_output=True, text=True, cwd=work, check=False)


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["--version"]])
def test_closed_streams_are_no_fault(closed: tuple[int, ...], arguments: list[str], tmp_path: Path) -> None:
    ended = closing(*closed, command=[*OAZOO, *arguments], work=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "error" not in ended.stderr
    assert bool(ended.stdout) == (1 not in closed)


def test_what_is_printed_never_goes_into_a_file(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom oazoo.cli.common import run_and_exit\n"
        "def call():\n    with Path('data').open('wb') as file:\n        os.write(1, b'noise')\n"
        "        file.write(b'data')\n"
        "run_and_exit(call)\n"
    )
    ended = closing(0, 1, command=[sys.executable, "-c", program], work=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "data").read_bytes() == b"data"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_output_says_so() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([*OAZOO, "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert "standard output cannot be written" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_no_unfinished_file(number: signal.Signals, status: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.readline() == "ready\n"
        assert len(list(tmp_path.iterdir())) == 1
        running.send_signal(number)
        said = running.stderr.read()
    assert running.returncode == status
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_to_be_ignored_stays_ignored() -> None:
    program = (
        "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from oazoo.cli.common import run_and_exit\n"
        "run_and_exit(lambda: os.kill(os.getpid(), signal.SIGHUP))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_interruption_that_a_library_hides_is_still_one() -> None:
    program = (
        "import os, signal\nfrom oazoo.cli.common import run_and_exit\n"
        "def call():\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        signal.pause()\n"
        "    except KeyboardInterrupt:\n        raise ImportError('extension failed to import') from None\n"
        "run_and_exit(call)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "error: interrupted\n")


def test_interruptions_wait_for_a_commands_file() -> None:
    program = (
        "import os, signal\nfrom oazoo.cli.common import delayed_interrupt, run_and_exit\n"
        "def call():\n    with delayed_interrupt():\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "        print('loaded', flush=True)\n    print('not reached')\n"
        "run_and_exit(call)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "loaded\n")
