"""Checkpoints that OA wrote: what model they hold, and the same weights and optimizer state in a file that runs here.

OA names tensors p0, p1, … and writes no configuration. The shapes tell that of a Transformer, but for how many heads its
attention has, and how many of its experts a token goes to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from oazoo import __version__
from oazoo.configs import TransformerConfig
from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.text.train import byte_tokenizer_json

_ARCHITECTURE = "RustModule"
#: Tensors: embeddings, last norm, head; and those of each layer, without experts and with.
_AROUND, _OF_A_LAYER, _OF_A_MIXTURE = 6, 16, 17
#: Where the first layer's experts, or its MLP, are.
_EXPERTS, _UP = 12, 14
Shapes = Mapping[str, tuple[int, ...]]


def is_oa(source: OamSource) -> bool:
    """Whether OA itself wrote the file: its architecture, and names that are numbers."""
    return source.config.architecture == _ARCHITECTURE and set(source) == {
        f"p{index}" for index in range(len(source))
    }


def transformer_config(
    shapes: Shapes, heads: int | None, where: str, experts_per_token: int | None = None
) -> TransformerConfig:
    """The configuration of a Transformer of OA's.

    Args:
        shapes: of p0, p1, …
        heads: of its attention; None for those of a model that OA has under a name (ByteTransformer, ByteMoeTransformer).
        where: the file, for messages.
        experts_per_token: of a mixture of experts, likewise.

    Raises:
        FormatError: the shapes are not those of such a model.
        UsageError: the number of heads must be told, or cannot be that.
    """
    listed = [shapes[f"p{index}"] for index in range(len(shapes))]
    mixture = len(listed) > _EXPERTS and len(listed[_EXPERTS]) == 3
    layers, rest = divmod(len(listed) - _AROUND, _OF_A_MIXTURE if mixture else _OF_A_LAYER)
    told = f"{where}: OA wrote it, without its configuration"
    if rest or layers < 1 or any(len(shape) != 2 for shape in listed[:2]) or len(listed[_UP]) != 2 + mixture:
        raise FormatError(
            f"{told}, and its {len(listed)} tensors are not those of a Transformer, which is what can be run of OA's "
            "models; they can be inspected and compared"
        )
    (vocabulary, width), positions = listed[0], listed[1][0]
    experts = listed[_EXPERTS][0] if mixture else None

    def make(count: int, top: int | None) -> TransformerConfig:
        return TransformerConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=listed[_UP][-1] if mixture else listed[_UP][0],
            num_layers=layers,
            num_heads=count,
            max_positions=positions,
            num_experts=experts,
            experts_per_token=top,
        )

    named = TransformerConfig.byte_moe_transformer() if mixture else TransformerConfig.byte_transformer()
    if experts_per_token is not None and not mixture:
        raise UsageError(f"{told}. It has no experts")
    top = min(experts, 2) if experts and experts_per_token is None else experts_per_token
    try:
        config = make(heads or 1, top)
    except OazooError as error:
        raise UsageError(f"{where}: {error}") from error
    for (name, wanted), found in zip(config.parameters().items(), listed, strict=True):
        if wanted != found:
            raise FormatError(
                f"{told}, and its tensors are not those of a Transformer: what would be {name} has shape {list(found)} and "
                f"not {list(wanted)}. They can be inspected and compared"
            )
    if config != named and (heads is None or (mixture and experts_per_token is None)):
        options = "--heads N --experts-per-token K" if mixture else "--heads N"
        more = f", and to how many of its {experts} experts a token goes," if mixture else ""
        raise UsageError(
            f"{told}. It is a Transformer of {layers} layers of width {width}; how many heads its attention has{more} must "
            f"be told: oazoo convert {Path(where).name} {options} -o OUT.oam"
        )
    return config


def import_oa(
    path: Path | str,
    output: Path | str,
    *,
    heads: int | None = None,
    experts_per_token: int | None = None,
    vocabulary: Path | None = None,
    overwrite: bool = False,
) -> TransformerConfig:
    """Write a checkpoint of OA's as a file that runs, and trains on: weights, optimizer state and progress unchanged.

    Args:
        path: the checkpoint.
        output: the file to write.
        heads: of the model's attention; see :func:`transformer_config`.
        experts_per_token: of its mixtures of experts, likewise.
        vocabulary: its tokenizer's ``oa_bpe_v1`` file; models over 256 tokens have bytes if None.
        overwrite: replace an existing output.

    Raises:
        FormatError, UsageError: see :func:`transformer_config`; or the file is none of OA's.
    """
    with OamSource(path) as source:
        source.verify()
        if not is_oa(source):
            raise FormatError(f"{path}: is not a checkpoint that OA wrote")
        shapes = {name: tensor.info.shape for name, tensor in source.items()}
        config = transformer_config(shapes, heads, str(path), experts_per_token)
        assets = dict[str, bytes]()
        if vocabulary is not None:
            assets["oa_bpe_v1.txt"] = vocabulary.read_bytes()
        elif config.vocab_size == 256:
            assets["tokenizer.json"] = byte_tokenizer_json()
        document = {
            "oazoo": 1,
            "family": config.family,
            "model": config.to_json(),
            "source": {"format": "oam", "architecture": [_ARCHITECTURE]},
            "generation": {"eos_ids": []},
            "tokenizer": {},
            "tool": f"oazoo {__version__}",
        }
        payload = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        oam_config = OamConfig(
            config.family, config.hidden_size, config.num_layers, config.vocab_size, payload=payload
        )
        names = list(config.parameters())
        with OamWriter(
            output,
            config=oam_config,
            entries=[OamEntry(name, config.parameters()[name], "f32") for name in names],
            assets=assets,
            progress=source.progress,
            optimizer=source.optimizer,
            overwrite=overwrite,
        ) as writer:
            for index, name in enumerate(names):
                writer.write(name, np.asarray(source[f"p{index}"].numpy(), np.float32))
    return config
