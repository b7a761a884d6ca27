"""Names over the 127 bytes that an ``.oam`` has room for: stored shortened, shown in full.

A long name is cut, and ``~`` and a hash of the whole follow. The file's config maps stored names to full ones, under
``names``; everything above the reader and the writer knows full names only. The mapping comes with the file, so a reader
believes an entry only if shortening the full name gives the stored one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from oazoo.errors import FormatError
from oazoo.formats.mapped import MappedTensor
from oazoo.formats.messages import quoted
from oazoo.formats.oam_layout import MAX_NAME
from oazoo.formats.strict_json import decode_utf8, load_object

#: Where the config keeps the mapping.
KEY = "names"
#: What the readers of other containers let through.
MAX_FULL_NAME = 4096
#: Our config is read up to this many characters.
MAX_CONFIG = 1 << 24
_HASH = 24
#: How often a name is shortened anew because another tensor has the shortened one.
_TRIES = 8


def shortened(name: str) -> Iterator[str]:
    """The stored forms of a name over :data:`MAX_NAME` bytes, the preferred one first."""
    data = name.encode("utf-8")
    start = data[: MAX_NAME - _HASH - 1].decode("utf-8", "ignore")
    for number in range(_TRIES):
        salt = b"\0%d" % number if number else b""
        yield f"{start}~{hashlib.sha256(data + salt).hexdigest()[:_HASH]}"


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """Full name → stored name, of the long ones among ``names``; no two tensors get the same.

    Raises:
        FormatError: a name is over :data:`MAX_FULL_NAME` characters, not valid Unicode, or cannot be made unique.
    """
    names = list(names)
    taken = set(names)
    found: dict[str, str] = {}
    for name in names:
        try:
            if len(name.encode("utf-8")) <= MAX_NAME or name in found:
                continue
        except UnicodeEncodeError as error:
            raise FormatError(f"tensor name {quoted(name)} is not valid Unicode") from error
        if len(name) > MAX_FULL_NAME:
            raise FormatError(f"tensor name {quoted(name)} is over {MAX_FULL_NAME} characters")
        short = next((form for form in shortened(name) if form not in taken), None)
        if short is None:
            raise FormatError(
                f"tensor name {quoted(name)} cannot be shortened to {MAX_NAME} bytes: other tensors have every short form"
            )
        taken.add(short)
        found[name] = short
    return found


def with_names(payload: bytes, stored: Mapping[str, str]) -> bytes:
    """A config with the mapping of ``stored`` (full → stored) in place of what it has.

    Raises:
        FormatError: there are long names, but the config is not ours and so has no place for them, or becomes too large.
    """
    document: dict[str, Any] = {}
    if payload.lstrip().startswith(b"{"):
        try:
            document = load_object(decode_utf8(payload, "config"), "config", limit=MAX_CONFIG)
        except FormatError:
            document = {}
    if "oazoo" not in document:
        if stored:
            raise FormatError(
                f"tensor name {quoted(next(iter(stored)))} takes over {MAX_NAME} bytes, which only a config of oazoo's own "
                "can make up for"
            )
        return payload
    if not stored and KEY not in document:
        return payload
    document.pop(KEY, None)
    if stored:
        document[KEY] = {short: name for name, short in stored.items()}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_CONFIG:
        raise FormatError(
            f"the full names of {len(stored)} tensors make a config of {len(text)} characters; at most {MAX_CONFIG} are read"
        )
    return text.encode("utf-8")


def full_names(tensors: Mapping[str, MappedTensor], metadata: Mapping[str, Any]) -> dict[str, MappedTensor]:
    """The tensors of a file under their full names.

    Raises:
        FormatError: the mapping is not of its form, names a tensor that is not there, gives a name whose short form is
            another, or gives two tensors one name.
    """
    named = metadata.get(KEY, {})
    if not isinstance(named, dict):
        raise FormatError(f"config: {KEY!r} must be an object")
    for short, name in named.items():
        what = f"config: {KEY}: {quoted(short)}"
        if short not in tensors:
            raise FormatError(f"{what} is not a weight of this file")
        if not isinstance(name, str) or len(name) > MAX_FULL_NAME or "\0" in name:
            raise FormatError(f"{what} stands for {quoted(name)}, which is no tensor name")
        try:
            fits = len(name.encode("utf-8")) <= MAX_NAME
        except UnicodeEncodeError as error:
            raise FormatError(f"{what} stands for {quoted(name)}, which is not valid Unicode") from error
        if fits or short not in shortened(name):
            raise FormatError(f"{what} is not how {quoted(name)} is shortened")
    result: dict[str, MappedTensor] = {}
    for stored, tensor in tensors.items():
        name = named.get(stored, stored)
        if name in result:
            raise FormatError(f"config: {KEY}: two tensors are named {quoted(name)}")
        result[name] = tensor.with_name(name) if name != stored else tensor
    return result
