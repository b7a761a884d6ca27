"""Reading a GPT-2 style language model out of an ONNX graph, from the logits backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from oazoo.translators.onnx_match import Attention, Matcher
from oazoo.translators.onnx_values import slices
from oazoo.translators.onnx_view import Linear, Norm, Unproven

MAX_LAYERS = 4096
#: What a branch is made of; the norm comes last.
Branch = TypeVar("Branch", bound=tuple[Any, ...])


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


def read_model(m: Matcher, used: list[str]) -> Model:
    """The parts of the model; ``used`` collects the names of matrices as they are given a role.

    Raises:
        Unproven: the graph is something else.
    """
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
