"""``--arch raw``: every tensor of any container under its own name, and no model."""

from __future__ import annotations

from oazoo.errors import TranslationError
from oazoo.formats.oam_layout import MAX_NAME, MAX_RANK
from oazoo.formats.oam_names import stored_names
from oazoo.translators.raw_config import RawConfig
from oazoo.translators.rules import Rule
from oazoo.translators.translator import Checkpoint, Translation, Translator


def _translate(checkpoint: Checkpoint) -> Translation:
    source = checkpoint.source
    rules, shapes = [], {}
    for name, tensor in source.items():
        if len(tensor.info.shape) > MAX_RANK:
            raise TranslationError(
                f"{source.path}: tensor {name[:128]!r} has {len(tensor.info.shape)} dimensions; an .oam holds {MAX_RANK}"
            )
        shapes[name] = tensor.info.shape
        rules.append(Rule(name, (name,)))
    if not rules:
        raise TranslationError(f"{source.path}: holds no tensors")
    notes = ["the tensors are kept without a model: the file can be read and inspected, but not run"]
    long = stored_names(source)
    if long:
        notes.append(
            f"{len(long)} names are over {MAX_NAME} bytes: other programs see them shortened in the .oam, oazoo in full"
        )
    return Translation(RawConfig(shapes), rules, notes=notes, any_type=True)


TRANSLATORS = (Translator("raw", "Tensors", ("raw:any",), _translate),)
