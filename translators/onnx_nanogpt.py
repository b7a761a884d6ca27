"""NanoGPT and GPT-2 from an ONNX graph, whatever its weights are called.

The graph is read backwards from the logits: head, final norm, then block by block (feed-forward, attention) down to the sum
of token and position embedding. What each weight is follows from where it stands. What cannot be proven is refused, with
the weights that have no role yet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.formats.onnx import OnnxSource
from oazoo.translators.onnx_gpt import Model, read_model
from oazoo.translators.onnx_match import Attention, Matcher, Piece
from oazoo.translators.onnx_values import FAULTS
from oazoo.translators.onnx_view import Linear, Norm, Unproven
from oazoo.translators.rules import Chain, Concat, Identity, Ignored, Reshape, Rule, Transpose2D
from oazoo.translators.translator import Checkpoint, Translation, Translator

_SHOWN = 12
_STEP = 1 << 20


def _translate(checkpoint: Checkpoint) -> Translation:
    source = checkpoint.source
    assert isinstance(source, OnnxSource)
    used: list[str] = []
    try:
        matcher = Matcher(source)
        model = read_model(matcher, used)
        return _translation(matcher, model)
    except (Unproven, *FAULTS) as fault:
        what = str(fault) if isinstance(fault, Unproven) else f"a node is malformed ({fault})"
        raise TranslationError(
            f"{source.path}: the graph is not proven to be a GPT-2 style language model: {what}. "
            f"{_candidates(source, used)}To keep all tensors under their names, without a model: --arch raw"
        ) from fault


def _candidates(source: OnnxSource, used: Sequence[str]) -> str:
    """The matrices that have no role yet, with their shapes."""
    left = [
        f"{name[:64]} {list(source[name].info.shape)}"
        for name in source.graph.initializers
        if name not in used and len(source[name].info.shape) == 2
    ]
    if not left:
        return ""
    more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    return f"Weights without a proven role: {', '.join(left[:_SHOWN])}{more}. "


# -- what follows from it ----------------------------------------------------------------------------------------------


def _translation(m: Matcher, model: Model) -> Translation:
    source = m.source
    if not model.blocks:
        raise Unproven("it has no layers")
    first = model.blocks[0]
    vocab, hidden = source[model.embedding].info.shape
    notes: list[str] = []
    table = source[model.positions].info.shape
    if source.graph.inputs and isinstance(_declared_length(m), int):
        notes.append(
            f"the graph was exported for {_declared_length(m)} tokens; {table[-2]} positions are stored"
        )
    copy = _tied_copy(source, model)
    if copy:
        notes.append(f"{copy[:64]} holds the embedding again, so the head is tied to it")
    config = NanoGPTConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=first.up.rows,
        num_layers=len(model.blocks),
        num_heads=first.attention.heads,
        norm_eps=model.norm.eps,
        max_positions=table[-2],
        tied_embeddings=copy is not None,
        bias=first.o.bias is not None,
        norm_bias=model.norm.bias is not None,
        activation=first.activation,
    )
    _check_alike(model, config)
    rules = _rules(m, model, config)
    used = {name for rule in rules for name in rule.sources}
    return Translation(config, rules, _ignored(m, used, copy), notes)


def _declared_length(m: Matcher) -> object:
    return next(
        v.shape[1] for v in m.source.graph.inputs if v.name == m.values.tokens and v.shape is not None
    )


def _tied_copy(source: OnnxSource, model: Model) -> str | None:
    """The name of the head's weight if it is the embedding, or the same bytes transposed ('' for the very same tensor)."""
    head, table = source[model.head.weight], source[model.embedding]
    if model.head.weight == model.embedding:
        return "" if model.head.out_first else None
    if head.info.encoding != table.info.encoding or head.info.numel != table.info.numel:
        return None
    ours, theirs = table.numpy(), head.numpy()
    theirs = theirs if model.head.out_first else theirs.T
    if ours.shape != theirs.shape:
        return None
    rows = max(1, _STEP // max(1, ours.shape[-1]))
    kind = f"u{ours.dtype.itemsize}"
    same = all(
        np.array_equal(
            np.ascontiguousarray(ours[at : at + rows]).view(kind),
            np.ascontiguousarray(theirs[at : at + rows]).view(kind),
        )
        for at in range(0, len(ours), rows)
    )
    return model.head.weight if same else None


def _check_alike(model: Model, config: NanoGPTConfig) -> None:
    """All layers must be of the same form: heads, activation, epsilon, biases."""
    for number, block in enumerate(model.blocks):
        projections = (block.attention.q, block.attention.k, block.attention.v)
        lines = [block.o, block.up, block.down, *(piece.linear for piece in projections)]
        facts = {
            "heads": block.attention.heads == config.num_heads,
            "activation": block.activation == config.activation,
            "norm_eps": {block.attn_norm.eps, block.mlp_norm.eps} == {config.norm_eps},
            "biases": {line.bias is not None for line in lines} == {config.bias},
            "norm biases": {norm.bias is not None for norm in (block.attn_norm, block.mlp_norm)}
            == {config.has_norm_bias},
            "widths": all(piece.stop - piece.start == config.hidden_size for piece in projections),
        }
        unlike = [what for what, same in facts.items() if not same]
        if unlike:
            raise Unproven(f"layer {number} differs from the others in: {', '.join(unlike)}")


def _rules(m: Matcher, model: Model, config: NanoGPTConfig) -> list[Rule]:
    positions = m.source[model.positions].info.shape
    rules = [
        Rule("embed.weight", (model.embedding,)),
        Rule(
            "positions.weight",
            (model.positions,),
            Identity() if len(positions) == 2 else Reshape(positions, positions[1:]),
        ),
    ]
    for number, block in enumerate(model.blocks):
        at = f"layers.{number}"
        rules += _norm(f"{at}.attn_norm", block.attn_norm) + _norm(f"{at}.mlp_norm", block.mlp_norm)
        rules += _qkv(f"{at}.attn.qkv", block.attention)
        for part, line in (("attn.o", block.o), ("mlp.up", block.up), ("mlp.down", block.down)):
            rules += _linear(f"{at}.{part}", line)
    rules += _norm("norm", model.norm)
    if not config.tied_embeddings:
        rules += _linear("head", model.head)
    return rules


def _norm(name: str, norm: Norm) -> list[Rule]:
    rules = [Rule(f"{name}.weight", (norm.weight,))]
    return rules if norm.bias is None else [*rules, Rule(f"{name}.bias", (norm.bias,))]


def _linear(name: str, line: Linear) -> list[Rule]:
    rules = [Rule(f"{name}.weight", (line.weight,), Identity() if line.out_first else Transpose2D())]
    return rules if line.bias is None else [*rules, Rule(f"{name}.bias", (line.bias,))]


def _qkv(name: str, attention: Attention) -> list[Rule]:
    """The fused projection, from one weight in this order, or from three."""
    pieces: tuple[Piece, ...] = (attention.q, attention.k, attention.v)
    lines = [piece.linear for piece in pieces]
    width = lines[0].columns
    if len(set(lines)) == 1:
        if [(piece.start, piece.stop) for piece in pieces] != [
            (k * width, (k + 1) * width) for k in range(3)
        ]:
            raise Unproven(f"{lines[0].weight[:64]} does not hold queries, keys and values in this order")
        return _linear(name, lines[0])
    if any((piece.start, piece.stop) != (0, piece.linear.rows) for piece in pieces) or len(set(lines)) != 3:
        raise Unproven("queries, keys and values are cut from more than one weight")
    if len({line.out_first for line in lines}) != 1:
        raise Unproven("the weights of queries, keys and values are not all stored the same way round")
    sizes = tuple(line.rows for line in lines)
    join = Concat(0, sizes) if lines[0].out_first else Chain((Concat(1, sizes), Transpose2D()))
    rules = [Rule(f"{name}.weight", tuple(line.weight for line in lines), join)]
    biases = tuple(line.bias for line in lines if line.bias is not None)
    return [*rules, Rule(f"{name}.bias", biases, Concat(0, sizes))] if biases else rules


def _ignored(m: Matcher, used: set[str], copy: str | None) -> list[Ignored]:
    """Everything else, with its reason: what leads to the logits has been evaluated, the rest does not matter to them."""
    leading: set[str] = set()
    todo = [value.name for value in m.source.graph.outputs]
    while todo:
        name = todo.pop()
        if name in leading:
            continue
        leading.add(name)
        node = m.makers.get(name)
        todo += [part for part in node.inputs if part] if node is not None else []
    reasons: dict[str, list[str]] = {}
    for name in m.source:
        if name in used:
            continue
        if name == copy:
            reason = "the tied embedding"
        elif name in leading:
            reason = "a constant of the graph (shape, scale, mask), checked against the model's definition"
        else:
            reason = "no output depends on it"
        reasons.setdefault(reason, []).append(re.escape(name))
    return [Ignored("|".join(names), reason) for reason, names in reasons.items()]


TRANSLATORS = (Translator("onnx_nanogpt", "GPT-2, NanoGPT (ONNX graph)", ("onnx:graph",), _translate),)
