"""nanoGPT's own checkpoints (``ckpt.pt``), whose ``model_args`` describe the model.

Linear weights are PyTorch's, [out, in]. The names of a compiled model begin with ``_orig_mod.``, which is taken off. The
optimizer's state is left behind. Source: https://github.com/karpathy/nanoGPT, ``model.py`` and ``train.py``.
"""

from __future__ import annotations

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.formats.torch_zip import TorchSource
from oazoo.translators.engine import same_bytes
from oazoo.translators.gpt2 import source_name
from oazoo.translators.rules import Ignored, Rule
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint, Translation, Translator

#: What nanoGPT's LayerNorm has in its code; a checkpoint does not state it.
_EPS = 1e-5
_COMPILED = "model._orig_mod."
_MASK = "causal mask: made by the attention itself"
_IGNORED = (
    Ignored(r"optimizer\..*", "state of the optimizer, no weight"),
    Ignored(r"best_val_loss|iter_num", "progress of the training, no weight"),
)


def _translate(checkpoint: Checkpoint) -> Translation:
    source = checkpoint.source
    settings = Settings(checkpoint.config.get("model_args"), f"{source.path}: model_args")
    start = _COMPILED if any(name.startswith(_COMPILED) for name in source) else "model."
    prefix = f"{start}transformer."
    embedding = _shape(checkpoint, f"{prefix}wte.weight")
    bias = f"{prefix}h.0.attn.c_attn.bias" in source
    if "bias" in settings and settings.boolean("bias") != bias:
        raise TranslationError(
            f"{settings.where}: bias = {settings.boolean('bias')}, but the linear layers have {'one' if bias else 'none'}"
        )
    head = f"{start}lm_head.weight"
    tied = head not in source or _is_tied(source, head, f"{prefix}wte.weight")
    config = NanoGPTConfig(
        vocab_size=settings.integer("vocab_size", embedding[0]),
        hidden_size=settings.integer("n_embd"),
        intermediate_size=_shape(checkpoint, f"{prefix}h.0.mlp.c_fc.weight")[0],
        num_layers=settings.integer("n_layer"),
        num_heads=settings.integer("n_head"),
        norm_eps=_EPS,
        max_positions=settings.integer("block_size"),
        tied_embeddings=tied,
        bias=bias,
        norm_bias=f"{prefix}h.0.ln_1.bias" in source,
        activation="gelu",
    )
    notes = ["the checkpoint does not state the form of GELU: that of nanoGPT, the exact one, is used"]
    ignored = [*_IGNORED, Ignored(_pattern(prefix) + r"h\.\d+\.attn\.bias", _MASK)]
    if tied:
        ignored.append(Ignored(_pattern(head), "the tied embedding"))
    else:
        notes.append("the head differs from the embedding, so both are kept (nanoGPT itself ties them)")
    rules = [
        Rule(target, (head if target == "head.weight" else source_name(target, prefix),))
        for target in config.parameters()
    ]
    return Translation(config, rules, ignored, notes)


def _is_tied(source: object, head: str, embedding: str) -> bool:
    """Whether head and embedding are one storage, or hold the same bytes."""
    assert isinstance(source, TorchSource)
    together = {source.shared.get(head, head), source.shared.get(embedding, embedding)}
    return len(together) == 1 or (embedding in source and same_bytes(source, head, embedding))


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    if name not in checkpoint.source:
        raise TranslationError(
            f"{checkpoint.source.path}: the checkpoint lacks {name}, so it is no model of nanoGPT"
        )
    shape = checkpoint.source[name].info.shape
    if len(shape) != 2:
        raise TranslationError(
            f"{checkpoint.source.path}: {name} has shape {list(shape)}, it must be a matrix"
        )
    return shape


def _pattern(text: str) -> str:
    return text.replace(".", r"\.")


TRANSLATORS = (Translator("nanogpt", "nanoGPT", ("torch:nanogpt",), _translate),)
