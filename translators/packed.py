"""Recognising checkpoints that some other tool has packed, before any work is done on them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from oazoo.errors import TranslationError
from oazoo.translators.translator import Checkpoint

#: Tensor names that give a packing scheme away: pattern, scheme.
_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.(qweight|qzeros|g_idx)$"), "GPTQ or AWQ"),
    (
        re.compile(r"\.(SCB|weight_format)$|\.(absmax|quant_map|nested_absmax|quant_state\..*)$"),
        "bitsandbytes",
    ),
    (
        re.compile(r"\.(weight_scale|input_scale|output_scale|[kv]_scale|scale_inv)$"),
        "FP8 with one scale a tensor",
    ),
    (re.compile(r"\.(weight_packed|weight_shape|weight_zero_point)$"), "compressed-tensors"),
    (
        re.compile(r"\.(weight_scale_2|weight_scales|weight_quantizer\..*)$"),
        "NVFP4, EETQ, or another scheme with scales",
    ),
    (re.compile(r"\.(W_q|Qidxs|codebooks|centroids)$"), "HQQ, QuIP#, AQLM or VPTQ"),
    (re.compile(r"\._(data|scale)$"), "Quanto"),
    (re.compile(r"_blocks$|_scales$"), "MXFP4 in blocks and scales"),
    (re.compile(r"\.(scales|biases)$"), "MLX, or another scheme with separate scales"),
)
_ADVICE = (
    "Such weights cannot be translated: take the original checkpoint (float32, float16 or bfloat16) or a GGUF file, "
    "and pack the result with: oazoo quantize"
)


def refuse_packed(checkpoint: Checkpoint) -> None:
    """Refuse a Hugging Face checkpoint whose weights are packed (FP8 in blocks has been decoded by then).

    Raises:
        TranslationError: names the scheme and what to do.
    """
    if checkpoint.naming != "hf":
        return
    settings = checkpoint.config.get("quantization_config") or checkpoint.config.get("quantization")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        what = f"by {str(method)[:64]}" if method else "(it has a quantization_config)"
        raise TranslationError(f"{checkpoint.where}: the checkpoint is already packed {what}. {_ADVICE}")
    for name in checkpoint.source:
        for pattern, scheme in _NAMES:
            if pattern.search(name):
                raise TranslationError(
                    f"{checkpoint.source.path}: the checkpoint is already packed, by its tensor {name[:128]!r} "
                    f"with {scheme}. {_ADVICE}"
                )
