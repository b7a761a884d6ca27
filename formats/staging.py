"""Atomic output of several files: they are made in a folder beside the target, and get their names when all are whole.

A killed process can leave that folder, ``.oazoo-….partial``, which nothing ever reads.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from oazoo.errors import OazooError, OutputError, UsageError
from oazoo.formats.atomic import check_output, output_error
from oazoo.formats.messages import some

#: What a file system without hard links says.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


@contextmanager
def staging(target: Path | str, shown: Path | str) -> Iterator[Path]:
    """A new, empty folder beside ``target``, on the same file system; removed at the end with what is left in it.

    Errors of the block name ``shown``, the folder in which the user will find the files, in its place.
    """
    named = Path(target)
    folder = Path(os.path.realpath(named)).parent / f".oazoo-{secrets.token_hex(8)}.partial"
    try:
        folder.mkdir()
    except OSError as error:
        raise output_error(named, error) from error
    try:
        yield folder
    except OazooError as error:
        raise type(error)(str(error).replace(str(folder), str(shown))) from error
    except OSError as error:
        raise output_error(shown, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_folder(path: Path | str, ours: Callable[[str], bool], *, overwrite: bool = False) -> Path:
    """Check in planning that the folder ``path`` can be written; returns it with symbolic links followed.

    Args:
        path: the folder; it may exist and be empty.
        ours: whether a file of this name may be replaced. A folder that holds any other is never replaced.
        overwrite: replace a folder that is not empty.

    Raises:
        UsageError: the folder is not empty and ``overwrite`` is not set, or it holds files that are not ours.
        OutputError: its parent is missing or not writable, or the target is a file.
    """
    named = Path(path)
    target = Path(os.path.realpath(named))
    if target.exists() and not target.is_dir():
        raise OutputError(f"{named}: is a file, not a folder")
    if target.is_dir():
        try:
            names = sorted(entry.name for entry in target.iterdir())
        except OSError as error:
            raise output_error(named, error) from error
        foreign = [name for name in names if not ours(name)]
        if names and not overwrite:
            raise UsageError(
                f"{named}: exists already and is not empty; use --force (overwrite=True) to replace it"
            )
        if foreign:
            raise UsageError(
                f"{named}: holds files that are not part of an export, so it is not replaced: {some(foreign)}"
            )
    check_output(target.parent / f".oazoo-{secrets.token_hex(4)}.partial")
    return target


def publish_folder(staged: Path, target: Path) -> None:
    """Give a staged folder its name; what was there before is removed only when the new one is in place."""
    _sync(staged)
    old: Path | None = None
    try:
        if target.exists():
            old = staged.parent / f"{staged.name}.old"
            target.rename(old)
        try:
            staged.rename(target)
        except OSError:
            if old is not None:
                old.rename(target)
            raise
    except OSError as error:
        raise output_error(target, error) from error
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def publish_files(staged: Path, targets: Mapping[str, Path], *, overwrite: bool = False) -> None:
    """Give staged files their names, in the order of ``targets`` (staged name → target): the one that counts comes last.

    If one cannot get its name, those before it are taken back, and what was there before is put back.
    """
    _sync(staged)
    done: list[tuple[Path, Path | None]] = []
    for name, target in targets.items():
        try:
            kept = _keep(target, staged / f".kept-{len(done)}") if overwrite else None
            if overwrite:
                (staged / name).replace(target)
            else:
                _publish_new(staged / name, target)
        except BaseException as error:
            for published, former in reversed(done):
                _take_back(published, former)
            if isinstance(error, OSError):
                raise output_error(target, error) from error
            raise
        done.append((target, kept))


def _keep(target: Path, kept: Path) -> Path | None:
    """A second name for a file that is about to be replaced; None if there is no such file."""
    if not target.exists():
        return None
    try:
        os.link(target, kept)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(target, kept)
    return kept


def _take_back(published: Path, former: Path | None) -> None:
    try:
        if former is None:
            published.unlink()
        else:
            former.replace(published)
    except OSError:
        pass  # the error that led here is the one to tell


def _publish_new(source: Path, target: Path) -> None:
    # A hard link fails if somebody has created the name meanwhile; a rename would destroy their file.
    try:
        os.link(source, target)
    except FileExistsError as error:
        raise UsageError(f"{target}: was created by somebody else meanwhile; not replaced") from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        source.replace(target)


def _sync(folder: Path) -> None:
    """Flush the small files of a staged folder to disk (the weights have been)."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
