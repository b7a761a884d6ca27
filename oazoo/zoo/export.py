"""From an `.oam` file to SafeTensors, GGUF or ONNX."""

from __future__ import annotations

from pathlib import Path

from oazoo.formats.oam import OamSource
from oazoo.translators.convert import Progress
from oazoo.translators.export import MAX_SHARD_BYTES, ExportReport, as_model
from oazoo.translators.export import export as write
from oazoo.translators.export_plan import ExportPlan, plan_export
from oazoo.translators.own_map import load_map
from oazoo.zoo.files import open_file


def export(
    source: str | Path,
    output: str | Path,
    *,
    to: str | None = None,
    dtype: str = "keep",
    overwrite: bool = False,
    with_tokenizer: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    external: bool = False,
    map_file: str | Path | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write an `.oam` model as a Hugging Face folder, a SafeTensors file, a GGUF file or an ONNX graph.

    Args:
        source: path of the `.oam`.
        output: a folder, ``OUT.safetensors`` (config and tokenizer files go beside it), ``OUT.gguf``, or ``OUT.onnx``
            (tokenizer files go beside it).
        to: ``safetensors``, ``gguf`` or ``onnx``, where the output's name does not say.
        dtype: ``keep``, ``f32``, ``f16`` or ``bf16``; see :func:`oazoo.translators.export.export`.
        overwrite: replace an existing output.
        with_tokenizer: carry tokenizer and chat template.
        max_shard_bytes: a folder's weights are cut into files of about this size.
        external: put the weights of an ONNX graph into ``OUT.onnx.data``, as for models of 1.5 GB and more.
        map_file: a map of your own, run backwards; see :func:`oazoo.zoo.convert.convert`.
        progress: called with how far the work has come.

    Raises:
        OazooError: UsageError, FormatError, TranslationError, TokenizerError or OutputError; nothing is left behind.
    """
    own = load_map(map_file) if map_file is not None else None
    with as_model(open_file(source)) as model:
        return write(
            model,
            output,
            to=to,
            dtype=dtype,
            overwrite=overwrite,
            with_tokenizer=with_tokenizer,
            max_shard_bytes=max_shard_bytes,
            external=external,
            own=own,
            progress=progress,
        )


def plan_of(
    source: str | Path,
    container: str,
    *,
    dtype: str = "keep",
    with_tokenizer: bool = True,
    map_file: str | Path | None = None,
) -> tuple[OamSource, ExportPlan]:
    """The checked plan of an export, for ``--dry-run``, and the opened model; close that."""
    own = load_map(map_file) if map_file is not None else None
    model = as_model(open_file(source))
    try:
        return model, plan_export(model, container, dtype, with_tokenizer=with_tokenizer, own=own)
    except BaseException:
        model.close()
        raise
