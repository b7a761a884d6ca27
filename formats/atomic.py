"""Atomic output: a file appears under its name whole and on disk, or not at all.

Bytes go to a temporary file in the target's folder, are flushed to disk, and the file is renamed. On any failure,
Ctrl-C included, the temporary file is removed and what was under the name before is untouched. A killed process can
leave a temporary file, ``.oazoo-….partial``, which nothing ever reads; the next write into the folder removes it. Whether
its writer still lives is told by the lock that every writer holds on its own file.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO

from oazoo.errors import OutputError, UsageError

if sys.platform != "win32":
    import fcntl

#: A temporary file younger than this is left alone, whoever made it.
_YOUNG_SECONDS = 10

_REASONS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the file system or the process limit (ulimit -f) allows",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied: the folder is not writable for you",
    errno.EPERM: "permission denied: the folder is not writable for you",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.ENOENT: "the folder does not exist; create it first",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}


def check_output(path: Path | str, *, overwrite: bool = False) -> Path:
    """Check in planning that ``path`` can be written; returns the file that will be written (symbolic links followed).

    Raises:
        UsageError: a file of this name exists and ``overwrite`` is not set.
        OutputError: the folder is missing or not writable, or the target is a folder, a device or a pipe.
    """
    named = Path(path)
    if "\0" in str(named):
        raise OutputError(f"{str(named)!r}: a file name cannot hold a NUL character")
    if not named.name:
        raise OutputError(f"{named}: names a folder, not a file")
    try:
        target = Path(os.path.realpath(named))
        mode = target.stat().st_mode
    except FileNotFoundError:
        pass
    except OSError as error:
        raise output_error(named, error) from error
    else:
        if stat.S_ISDIR(mode):
            raise OutputError(f"{named}: is a folder; name a file in it, such as {named / 'model.oam'}")
        if not stat.S_ISREG(mode):
            raise OutputError(f"{named}: is not a regular file, so it cannot be replaced by one")
        if not overwrite:
            raise UsageError(f"{named}: exists already; use --force (overwrite=True) to replace it")
    folder = target.parent
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder; create it first"
        raise OutputError(f"{named}: cannot be written: {folder}: {what}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{named}: cannot be written: {folder}: {_REASONS[errno.EACCES]}")
    return target


def check_not_input(path: Path | str, inputs: Iterable[Path]) -> None:
    """Check in planning that ``path`` is none of the files that are read, under whatever name.

    Raises:
        UsageError: it is one; replacing it would lose the source.
    """
    for source in inputs:
        try:
            same = Path(path).samefile(source)
        except OSError:
            continue  # one of them does not exist; that is told where it matters
        if same:
            raise UsageError(
                f"{path}: is the source itself, which would be lost; write the result under another name"
            )


def check_space(path: Path | str, size: int) -> None:
    """Check in planning that a file of ``size`` bytes fits the disk of ``path``; raises OutputError with both numbers."""
    folder = Path(os.path.realpath(path)).parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise output_error(path, error) from error
    if size > free:
        raise OutputError(f"{path}: takes {size} bytes, but only {free} are free on the disk of {folder}")


def output_error(path: Path | str, error: OSError) -> OutputError:
    """The error to raise when writing ``path`` failed with ``error``."""
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return OutputError(f"{path}: cannot be written: {reason}")


def reserve(file: BinaryIO, size: int) -> None:
    """Give a new file its size, and where the file system can do that at once, its room on the disk.

    Writing into room that is there already takes less time, and a full disk is known before the work.

    Raises:
        OSError: there is no such room.
    """
    file.truncate(size)
    if sys.platform != "linux":
        return
    import ctypes

    # Not os.posix_fallocate: where the file system cannot, that writes into every block.
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None or not size:
        return
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(file.fileno(), 0, 0, size):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            file.truncate(0)  # what room there was
            raise OSError(code, os.strerror(code))


class EarlyFlush:
    """Has what is written to a file flushed to disk by a thread of its own, so that the flush at the end has little to do.

    Merely starting the writing does not do it: where a disk has a cache of its own, emptying that takes most of the time.
    On systems without such a call nothing happens: only speed depends on it.
    """

    STEP = 32 << 20

    def __init__(self, file: BinaryIO) -> None:
        self._handle = file.fileno()
        self._dirty = 0
        self._failure: OSError | None = None
        self._steps: SimpleQueue[bool] = SimpleQueue()
        self._thread: Thread | None = None

    def wrote(self, size: int) -> None:
        """Note that ``size`` more bytes have been written, somewhere in the file. One thread at a time calls this."""
        self._dirty += size
        if self._dirty < self.STEP or not hasattr(os, "fdatasync"):
            return
        self._dirty = 0
        if self._thread is None:
            self._thread = Thread(target=self._run, name="oazoo-flush", daemon=True)
            self._thread.start()
        if self._steps.empty():
            self._steps.put(True)

    def close(self) -> None:
        """End the thread.

        Raises:
            OSError: a flush failed. The system tells that once, so the flush at the end would not know of it.
        """
        if self._thread is not None:
            self._steps.put(False)
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while self._steps.get():
            try:
                os.fdatasync(self._handle)
            except OSError as error:
                self._failure = self._failure or error


def _try_lock(file: BinaryIO) -> bool:
    """Take the lock of a temporary file, held until it is closed; False when its writer has it."""
    if sys.platform == "win32":
        return False  # leftovers stay until somebody removes them
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files of writers that are gone. One that was just created may not be locked yet: it is too young."""
    for path in folder.glob(".oazoo-*.partial"):
        try:
            if time.time() - path.stat().st_mtime < _YOUNG_SECONDS or path.is_symlink():
                continue
            with path.open("rb") as file:
                if _try_lock(file):
                    path.unlink()
        except OSError:
            continue  # somebody else's, or gone meanwhile


class AtomicFile:
    """A temporary file that takes the place of ``path`` at :meth:`commit`, or vanishes at :meth:`abort`.

    Raises (on construction and commit) what :func:`check_output` does.
    """

    def __init__(self, path: Path | str, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        self._target = check_output(path, overwrite=overwrite)
        _remove_leftovers(self._target.parent)
        self._temporary = self._target.parent / f".oazoo-{os.urandom(8).hex()}.partial"
        try:
            self.file: io.BufferedRandom = self._temporary.open("x+b")
        except OSError as error:
            raise output_error(path, error) from error
        _try_lock(self.file)

    @property
    def raw(self) -> io.FileIO:
        """The same file without a buffer, for who writes large pieces (and then nothing through ``file``)."""
        assert isinstance(self.file.raw, io.FileIO)
        return self.file.raw

    def commit(self) -> None:
        """Flush everything to disk and give the file its name."""
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            if self._overwrite:
                self._temporary.replace(self._target)
            else:
                self._publish_new()
            _sync_folder(self._target.parent)
        except OSError as error:
            self.abort()
            raise output_error(self.path, error) from error
        except BaseException:
            self.abort()
            raise

    def _publish_new(self) -> None:
        # A hard link fails if somebody has created the name meanwhile; a rename would destroy their file.
        try:
            os.link(self._temporary, self._target)
        except FileExistsError as error:
            raise UsageError(f"{self.path}: was created by somebody else meanwhile; not replaced") from error
        except OSError:
            # File systems without hard links.
            if self._target.exists():
                raise UsageError(
                    f"{self.path}: was created by somebody else meanwhile; not replaced"
                ) from None
            self._temporary.replace(self._target)
        else:
            self._temporary.unlink()

    def abort(self) -> None:
        """Remove the temporary file. Does nothing after :meth:`commit`."""
        try:
            self.file.close()
        except OSError:
            pass  # buffered bytes that no longer fit the disk; they are thrown away anyway
        self._temporary.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path | str, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Write ``path`` atomically: leaving the block commits, an exception of any kind removes the temporary file.

    Operating-system errors of the block that come from writing become :class:`OutputError`.
    """
    output = AtomicFile(path, overwrite=overwrite)
    try:
        yield output.file
    except BaseException as error:
        output.abort()
        if isinstance(error, OSError) and error.errno in _REASONS:
            raise output_error(path, error) from error
        raise
    output.commit()


def write_atomically(path: Path | str, data: bytes, *, overwrite: bool = False) -> None:
    """Write a small file in one go. Raises what :func:`check_output` does."""
    with atomic_file(path, overwrite=overwrite) as file:
        file.write(data)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems cannot; the rename itself has happened
    finally:
        os.close(handle)
