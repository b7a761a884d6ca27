"""``--arch raw``: every tensor of any container under its own name, and no model.

A name that is too long for an ``.oam`` is cut and made unique by a hash; the original is kept in the file's config, under
``names``, so that nothing is lost.
"""

from __future__ import annotations

import hashlib

from oazoo.errors import TranslationError
from oazoo.formats.oam_layout import MAX_NAME, MAX_RANK
from oazoo.translators.raw_config import RawConfig
from oazoo.translators.rules import Rule
from oazoo.translators.translator import Checkpoint, Translation, Translator

_HASH = 24


def stored_name(name: str) -> str:
    """The name under which a tensor is stored: itself if it fits, else its beginning, ``~`` and a hash of the whole."""
    data = name.encode("utf-8")
    if len(data) <= MAX_NAME:
        return name
    digest = hashlib.sha256(data).hexdigest()[:_HASH]
    return data[: MAX_NAME - _HASH - 1].decode("utf-8", "ignore") + "~" + digest


def _translate(checkpoint: Checkpoint) -> Translation:
    source = checkpoint.source
    rules, shapes, names = [], {}, {}
    for name, tensor in source.items():
        target = stored_name(name)
        if target in shapes:
            raise TranslationError(f"{source.path}: two tensors would be stored as {target!r}")
        if len(tensor.info.shape) > MAX_RANK:
            raise TranslationError(
                f"{source.path}: tensor {name[:128]!r} has {len(tensor.info.shape)} dimensions; an .oam holds {MAX_RANK}"
            )
        shapes[target] = tensor.info.shape
        if target != name:
            names[target] = name
        rules.append(Rule(target, (name,)))
    if not rules:
        raise TranslationError(f"{source.path}: holds no tensors")
    notes = ["the tensors are kept without a model: the file can be read and inspected, but not run"]
    if names:
        notes.append(
            f"{len(names)} names were over {MAX_NAME} bytes and were cut; the config has the original ones"
        )
    return Translation(RawConfig(shapes, names), rules, notes=notes, any_type=True)


TRANSLATORS = (Translator("raw", "Tensors", ("raw:any",), _translate),)
