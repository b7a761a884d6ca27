"""Output appears whole or not at all, and refusals say why."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from oazoo.errors import OutputError, UsageError
from oazoo.formats.atomic import AtomicFile, EarlyFlush, atomic_file, check_output, reserve, write_atomically
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.safetensors_writer import write_safetensors

ENTRY = OamEntry("w", (4,), "f32")


def writer(path: Path, overwrite: bool = False) -> OamWriter:
    return OamWriter(path, config=OamConfig("test"), entries=[ENTRY], overwrite=overwrite)


def test_success_leaves_one_file(tmp_path: Path) -> None:
    target = tmp_path / "модель 模型 é 🙂" / "a b.bin"
    target.parent.mkdir()
    write_atomically(target, b"content")
    assert target.read_bytes() == b"content" and len(list(target.parent.iterdir())) == 1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        ValueError("x"),
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError(),
    ],
)
def test_any_failure_removes_the_temporary_file(
    tmp_path: Path, overwrite: bool, error: BaseException
) -> None:
    target = tmp_path / "out"
    if overwrite:
        target.write_bytes(b"old")
    expected = OutputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), atomic_file(target, overwrite=overwrite) as file:
        file.write(b"half")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if overwrite else [])
    assert not overwrite or target.read_bytes() == b"old"


def test_no_space_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no space left"), atomic_file(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_existing_file_needs_force(tmp_path: Path) -> None:
    target = tmp_path / "out.oam"
    target.write_bytes(b"old")
    for attempt in (
        lambda: write_atomically(target, b"new"),
        lambda: write_safetensors(target, {}),
        lambda: writer(target).__enter__(),
        lambda: check_output(target),
    ):
        with pytest.raises(UsageError, match=r"out\.oam.*--force"):
            attempt()
    assert target.read_bytes() == b"old"
    write_atomically(target, b"new", overwrite=True)
    assert target.read_bytes() == b"new"


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(UsageError, match="meanwhile"), atomic_file(target) as file:
        file.write(b"ours")
        target.write_bytes(b"theirs")
    assert target.read_bytes() == b"theirs" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no/such/dir/x.oam", "no such folder"),
        ("folder", "is a folder"),
        ("file/x.oam", "a file, not a folder"),
        ("n" * 300, "too long"),
        ("a\0b", "NUL"),
        ("/dev/full", "not a regular file"),
        ("/dev/null", "not a regular file"),
        (".", "folder"),
        ("..", "folder"),
        ("loop", "symbolic links"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_impossible_targets(tmp_path: Path, path: str, words: str, overwrite: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError) as caught:
        write_atomically(tmp_path / path, b"", overwrite=overwrite)
    assert words in str(caught.value)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "folder", "loop"]


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" / "file")
    write_atomically(link, b"1")
    write_atomically(link, b"2", overwrite=True)
    assert link.is_symlink() and (tmp_path / "real" / "file").read_bytes() == b"2"


def _as_nobody(folder: Path) -> str:
    """What writing into ``folder`` says to a user without rights to it."""
    program = (
        "import os, sys; from pathlib import Path; from oazoo.errors import OutputError\n"
        "from oazoo.formats.atomic import write_atomically\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: write_atomically(Path(sys.argv[1]) / 'x', b'')\n"
        "except OutputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_read_only_folder() -> None:
    folder = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    try:
        folder.chmod(0o555)
        message = _as_nobody(folder)
        assert str(folder) in message and "permission denied" in message
        assert not list(folder.iterdir())
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["oam", "safetensors"])
def test_a_file_size_limit(tmp_path: Path, kind: str) -> None:
    # As a full disk does, the limit strikes in the middle of writing.
    target = tmp_path / "out"
    target.write_bytes(b"old")
    program = (
        "import resource, sys; import numpy as np\n"
        "from oazoo.errors import OutputError\n"
        "from oazoo.formats.oam_writer import *; from oazoo.formats.safetensors_writer import write_safetensors\n"
        "values = np.zeros(1 << 20, np.uint8)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
        "try:\n"
        "    if sys.argv[2] == 'oam':\n"
        "        entries = [OamEntry('w', (1 << 20,), 'u8')]\n"
        "        with OamWriter(sys.argv[1], config=OamConfig('t'), entries=entries, overwrite=True) as w:\n"
        "            w.write('w', values)\n"
        "    else: write_safetensors(sys.argv[1], {'w': values}, overwrite=True)\n"
        "except OutputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, target, kind], capture_output=True, text=True, check=True
    )
    assert str(target) in done.stdout and "ulimit -f" in done.stdout
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    program = (
        "import sys, time\n"
        "from oazoo.formats.atomic import atomic_file\n"
        "with atomic_file(sys.argv[1], overwrite=True) as file:\n"
        "    file.write(b'half'); file.flush(); print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, target], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert target.read_bytes() == b"old"
    write_atomically(target, b"new", overwrite=True)
    assert target.read_bytes() == b"new"


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    """A writer that was killed leaves its temporary; the next write removes it, but not one whose writer lives."""
    code = (
        "import os, signal, sys\n"
        "from oazoo.formats.atomic import AtomicFile\n"
        "file = AtomicFile(sys.argv[1])\n"
        "file.file.write(b'half')\n"
        "file.file.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "killed")], check=False)
    (left,) = tmp_path.glob(".oazoo-*.partial")
    living = AtomicFile(tmp_path / "living")
    living.file.write(b"going on")
    foreign = tmp_path / ".oazoo-notes.txt"
    foreign.write_text("mine")
    assert left.exists()  # too young to be judged
    old = time.time() - 3600
    for path in tmp_path.glob(".oazoo-*"):
        os.utime(path, (old, old))
    write_atomically(tmp_path / "next", b"whole")
    assert not left.exists()
    living.commit()
    assert (tmp_path / "living").read_bytes() == b"going on"
    assert foreign.exists()


def test_what_is_written_is_flushed_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(EarlyFlush, "STEP", 100)
    monkeypatch.setattr(os, "fdatasync", flushed.append, raising=False)
    with (tmp_path / "x").open("wb") as file:
        flush = EarlyFlush(file)
        flush.wrote(99)
        flush.close()
        assert not flushed  # too little yet
        flush.wrote(1)
        flush.close()
        assert flushed == [file.fileno()]


def test_a_failure_of_an_early_flush_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells it once; the flush at the end would succeed."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(EarlyFlush, "STEP", 100)
    monkeypatch.setattr(os, "fdatasync", fail, raising=False)
    with (tmp_path / "x").open("wb") as file:
        flush = EarlyFlush(file)
        flush.wrote(100)
        with pytest.raises(OSError, match="Input/output"):
            flush.close()
    target = tmp_path / "m.oam"
    entries = [OamEntry("w", (1 << 20,), "u8")]
    with (
        pytest.raises(OutputError, match=r"m\.oam: cannot be written: Input/output error"),
        OamWriter(target, config=OamConfig("raw"), entries=entries) as writer,
    ):
        writer.write("w", np.zeros(1 << 20, np.uint8))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_room_for_a_file(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as file:
        reserve(file, 3 << 20)
        assert os.fstat(file.fileno()).st_size == 3 << 20
        assert file.read() == bytes(3 << 20)
        reserve(file, 0)
        assert os.fstat(file.fileno()).st_size == 0
