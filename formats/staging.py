"""Atomic output of several files: they are made in a folder beside the target, and get their names when all are whole.

A killed process can leave that folder, ``.oazoo-….partial``, which nothing ever reads.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from oazoo.errors import OazooError, OutputError, UsageError
from oazoo.formats.atomic import check_output, output_error
from oazoo.formats.messages import some


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


def publish_files(staged: Path, targets: Collection[Path], *, overwrite: bool = False) -> None:
    """Give staged files their names, in the order of ``targets``: the one that counts comes last."""
    _sync(staged)
    for target in targets:
        source = staged / target.name
        try:
            if overwrite:
                source.replace(target)
            else:
                _publish_new(source, target)
        except OSError as error:
            raise output_error(target, error) from error


def _publish_new(source: Path, target: Path) -> None:
    # A hard link fails if somebody has created the name meanwhile; a rename would destroy their file.
    try:
        os.link(source, target)
    except FileExistsError as error:
        raise UsageError(f"{target}: was created by somebody else meanwhile; not replaced") from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        source.replace(target)


def _sync(folder: Path) -> None:
    """Flush the small files of a staged folder to disk (the weights have been)."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
