"""NanoGPT and GPT-2 from an ONNX graph, whatever its weights are called.

The graph is read backwards from the logits: head, final norm, then block by block (feed-forward, attention) down to the sum
of token and position embedding. What each weight is follows from where it stands. What cannot be proven is refused, with
the weights that have no role yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.formats.onnx import OnnxSource
from oazoo.translators.onnx_match import Attention, Matcher, Piece
from oazoo.translators.onnx_values import FAULTS, slices
from oazoo.translators.onnx_view import Linear, Norm, Unproven
from oazoo.translators.rules import Chain, Concat, Identity, Ignored, Reshape, Rule, Transpose2D
from oazoo.translators.translator import Checkpoint, Translation, Translator

MAX_LAYERS = 4096
#: What a branch is made of; the norm comes last.
Branch = TypeVar("Branch", bound=tuple[Any, ...])
_SHOWN = 12
_STEP = 1 << 20


@dataclass(frozen=True)
class Block:
    """One layer, its parts in the order in which they are computed."""

    attn_norm: Norm
    attention: Attention
    o: Linear
    mlp_norm: Norm
    up: Linear
    activation: str
    down: Linear


@dataclass(frozen=True)
class Model:
    """What the graph computes."""

    embedding: str
    positions: str
    blocks: list[Block]
    norm: Norm
    head: Linear


def _translate(checkpoint: Checkpoint) -> Translation:
    source = checkpoint.source
    assert isinstance(source, OnnxSource)
    used: list[str] = []
    try:
        matcher = Matcher(source)
        model = _read(matcher, used)
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


# -- reading the graph -------------------------------------------------------------------------------------------------


def _read(m: Matcher, used: list[str]) -> Model:
    if m.values.tokens is None:
        raise Unproven("it has no single input of whole numbers [batch, tokens]")
    head, norm = _head(m)
    used += [head.weight, norm.weight]
    blocks: list[Block] = []
    x = norm.input
    while True:
        found = _embedding(m, x)
        if found is not None:
            return Model(*found, blocks[::-1], norm, head)
        if len(blocks) >= MAX_LAYERS:
            raise Unproven(f"it has more than {MAX_LAYERS} layers")
        block, x = _block(m, x)
        blocks.append(block)
        used += [line.weight for line in (block.o, block.up, block.down, block.attention.q.linear)]
        used += [block.attention.k.linear.weight, block.attention.v.linear.weight]


def _head(m: Matcher) -> tuple[Linear, Norm]:
    """The product that makes the logits, and the norm before it (perhaps of the last position only)."""
    outputs = [value.name for value in m.source.graph.outputs]
    named = [name for name in outputs if name == "logits"] or outputs
    if len(named) != 1:
        raise Unproven(
            f"which of its {len(outputs)} outputs holds the logits is not told: {', '.join(outputs[:8])}"
        )
    head = m.linear(named[0])
    if head.bias is not None:
        raise Unproven(f"its head has a bias, {head.bias[:64]}, which a GPT-2 does not have")
    before = head.input
    node = m.maker(before)
    if node is not None and (
        (node.op == "Gather" and node.attributes.get("axis", 0) in (1, -2))
        or (node.op == "Slice" and m.shape(node.inputs[0])[-1] == m.shape(before)[-1])
    ):
        before = node.inputs[0]
    return head, m.norm(before)


def _block(m: Matcher, x: str) -> tuple[Block, str]:
    """The layer that makes ``x``, and what goes into it."""
    middle, (down, activation, up, mlp_norm) = _residual(m, x, _feed_forward)
    before, (o, attention, attn_norm) = _residual(m, middle, _attention)
    return Block(attn_norm, attention, o, mlp_norm, up, activation, down), before


def _residual(m: Matcher, x: str, branch: Callable[[Matcher, str], Branch]) -> tuple[str, Branch]:
    """``x`` as the sum of a value and of a branch that starts from the same value."""
    node = m.maker(m.flat(x))
    if node is None or node.op != "Add":
        raise Unproven(f"{m.describe(x)} is no sum of a residual and a branch")
    faults = []
    for one, other in (node.inputs, node.inputs[::-1]):
        try:
            found = branch(m, other)
            if m.flat(one) != found[-1].input:
                raise Unproven(f"{node}: its branch does not start from {m.describe(one)}", 6)
            return m.flat(one), found
        except Unproven as fault:
            faults.append(fault)
    raise max(faults, key=lambda fault: fault.progress)


def _feed_forward(m: Matcher, name: str) -> tuple[Linear, str, Linear, Norm]:
    down = m.linear(name)
    try:
        activation, inner = m.gelu(down.input)
        up = m.linear(inner)
        return down, activation, up, m.norm(up.input)
    except Unproven as fault:
        raise Unproven(str(fault), fault.progress + 1) from fault


def _attention(m: Matcher, name: str) -> tuple[Linear, Attention, Norm]:
    o = m.linear(name)
    try:
        attention = m.attention(o.input)
        inputs = {piece.linear.input for piece in (attention.q, attention.k, attention.v)}
        if len(inputs) != 1:
            raise Unproven("queries, keys and values are not of the same input", 5)
        return o, attention, m.norm(inputs.pop())
    except Unproven as fault:
        raise Unproven(str(fault), fault.progress + 1) from fault


def _embedding(m: Matcher, x: str) -> tuple[str, str] | None:
    """Token and position embedding of which ``x`` is the sum; None if it is something else."""
    node = m.maker(m.flat(x))
    if node is None or node.op != "Add":
        return None
    for one, other in (node.inputs, node.inputs[::-1]):
        tokens = _tokens(m, one)
        if tokens is not None:
            return tokens, _positions(m, other)
    return None


def _tokens(m: Matcher, name: str) -> str | None:
    node = m.maker(m.resolve(name))
    if node is None or node.op != "Gather" or node.attributes.get("axis", 0) != 0:
        return None
    index = node.inputs[1]
    cast = m.maker(index)
    if cast is not None and cast.op in ("Cast", "Identity"):
        index = cast.inputs[0]
    found = m.weight(node.inputs[0])
    return found[0] if index == m.values.tokens and found is not None and not found[1] else None


def _positions(m: Matcher, name: str) -> str:
    """The table whose rows 0, 1, 2 … are added."""
    length = m.values.length
    for _ in range(8):
        name = m.resolve(name)
        node = m.maker(name)
        if node is not None and node.op in ("Unsqueeze", "Expand", "Reshape"):
            name = node.inputs[0]
            continue
        break
    table, rows = name, None
    if node is not None and node.op == "Gather" and node.attributes.get("axis", 0) == 0:
        table, rows = node.inputs[0], m.values.value(node.inputs[1])
        if rows is None or not np.array_equal(rows.reshape(-1), np.arange(length)):
            raise Unproven(f"{node} does not take the positions 0, 1, 2 …")
    elif node is not None and node.op == "Slice":
        table = node.inputs[0]
        parts = slices(
            node, m.shape(table), [m.values.value(part) if part else None for part in node.inputs[1:]]
        )
        taken = [range(size)[part] for part, size in zip(parts, m.shape(table), strict=True)]
        whole = [range(size) for size in m.shape(table)]
        if taken[-2] != range(length) or taken[:-2] != whole[:-2] or taken[-1] != whole[-1]:
            raise Unproven(f"{node} does not take the positions 0, 1, 2 …")
    found = m.weight(table)
    if found is None or found[1]:
        raise Unproven(f"{m.describe(name)} is added to the token embedding and is no table of positions")
    shape = m.source[found[0]].info.shape
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != 1):
        raise Unproven(f"the positions {found[0][:64]} have shape {list(shape)}")
    if node is None and shape[-2] != length:
        raise Unproven(
            f"the positions {found[0][:64]} have {shape[-2]} rows, and the graph takes {length} tokens"
        )
    return found[0]


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
