"""Ready models as ONNX graphs that any runtime runs: token ids in, logits out, weights under the names of an ``.oam``.

The graph follows from the config and from what each weight is stored as, and from nothing else. So a graph that claims a
config is proven by writing the graph of that config anew and comparing the two: :mod:`oazoo.translators.onnx_ours`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.formats.onnx_graph import ValueInfo
from oazoo.formats.onnx_writer import GraphPlan
from oazoo.translators import onnx_out_layers as layers
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.onnx_out_nodes import FLOAT, INT64, GraphWriter
from oazoo.translators.rules import Rule

#: Of what :func:`graph_of` writes. It changes when a graph of the same config changes.
GRAPH_VERSION = "1"
#: Entries of the model's metadata: the version above, the family, and the config as JSON.
GRAPH, FAMILY, MODEL = "oazoo.graph", "oazoo.family", "oazoo.model"


def graph_of(config: ModelConfig, encodings: Mapping[str, str]) -> GraphPlan:
    """The graph of a model, without its weights.

    Args:
        config: the model.
        encodings: what each parameter is stored as: f32, f16, bf16 or f64. The graph computes in float32.

    Raises:
        TranslationError: the model has parts that are not written as a graph.
    """
    g = GraphWriter(encodings)
    layers.positions(g)
    if isinstance(config, DecoderConfig):
        _decoder(g, config)
    elif isinstance(config, NanoGPTConfig):
        _nanogpt(g, config)
    else:
        raise TranslationError(f"no graph is known for models of the family {config.family!r}")
    return g.graph(
        config.family,
        [ValueInfo(layers.TOKENS, INT64, ("batch", "sequence"))],
        [ValueInfo("logits", FLOAT, ("batch", "sequence", config.vocab_size))],
    )


def _decoder(g: GraphWriter, c: DecoderConfig) -> None:
    layers.masks(g, c.sliding_window)
    ropes = {c.layer_rope(layer): f"rope.{_kind(c, layer)}" for layer in range(c.num_layers)}
    for (theta, scaling), name in ropes.items():
        layers.rotary_tables(g, name, c.rotated, theta, scaling)
    x = layers.embedding(g, "embed", "embed.weight", layers.TOKENS)
    if c.embedding_scale is not None:
        x = g.op("embed.scaled", "Mul", x, g.number(c.embedding_scale))
    for layer in range(c.num_layers):
        at = f"layers.{layer}"
        h = _norm(g, c, f"{at}.attn_norm", x) if c.pre_norm else x
        attended = _decoder_attention(g, c, layer, h, ropes[c.layer_rope(layer)])
        if c.post_norm:
            attended = _norm(g, c, f"{at}.attn_post_norm", attended)
        after = g.op(f"{at}.attended", "Add", x, attended)
        h = x if c.parallel_residual else after
        h = _norm(g, c, f"{at}.mlp_norm", h) if c.pre_norm else h
        fed = _feed_forward(g, c, f"{at}.mlp", h)
        if c.post_norm:
            fed = _norm(g, c, f"{at}.mlp_post_norm", fed)
        x = g.op(at, "Add", after, fed)
    x = _norm(g, c, "norm", x)
    head = "embed.weight" if c.tied_embeddings else "head.weight"
    if c.logit_softcap is None:
        layers.matmul(g, "logits", x, head)
    else:
        layers.softcap(g, "logits", layers.matmul(g, "head", x, head), c.logit_softcap)


def _kind(c: DecoderConfig, layer: int) -> str:
    return "sliding" if c.sliding_rope_theta is not None and c.is_sliding(layer) else "full"


def _norm(g: GraphWriter, c: DecoderConfig, at: str, x: str) -> str:
    if c.norm == "layer":
        return layers.layer_norm(g, at, x, c.norm_eps)
    return layers.rms_norm(g, at, x, c.norm_eps, c.norm_offset)


def _decoder_attention(g: GraphWriter, c: DecoderConfig, layer: int, h: str, rope: str) -> str:
    at, parts = f"layers.{layer}.attn", []
    for name, count in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
        part = f"{at}.{name}"
        x = layers.linear(g, part, h)
        normed = c.qk_norm if name != "v" else None
        if normed == "full":
            x = layers.rms_norm(g, f"{part}_norm", x, c.norm_eps, c.norm_offset)
        x = layers.heads(g, part, x, count, c.head_dim)
        if normed == "head":
            x = layers.rms_norm(g, f"{part}_norm", x, c.norm_eps, c.norm_offset)
        x = layers.heads_first(g, part, x)
        if name != "v":
            x = layers.rotate(g, part, x, rope, c.head_dim, c.rotated)
        parts.append(layers.repeat_heads(g, part, x, count, c.num_heads // count, c.head_dim))
    mixed = layers.attention(
        g,
        at,
        *parts,
        mask="mask.causal" if c.layer_window(layer) is None else "mask.window",
        scale=c.score_scale,
        width=c.num_heads * c.head_dim,
        cap=c.attention_softcap,
    )
    return layers.linear(g, f"{at}.o", mixed)


def _feed_forward(g: GraphWriter, c: DecoderConfig, at: str, h: str) -> str:
    up = layers.linear(g, f"{at}.up", h)
    if c.gated_mlp:
        gate = layers.activation(g, f"{at}.active", c.activation, layers.linear(g, f"{at}.gate", h))
        inner = g.op(f"{at}.inner", "Mul", gate, up)
    else:
        inner = layers.activation(g, f"{at}.active", c.activation, up)
    return layers.linear(g, f"{at}.down", inner)


def _nanogpt(g: GraphWriter, c: NanoGPTConfig) -> None:
    layers.masks(g, None)
    table = layers.embedding(g, "positions.rows", "positions.weight", layers.POSITIONS)
    x = g.op("embedded", "Add", layers.embedding(g, "embed", "embed.weight", layers.TOKENS), table)
    hidden = c.hidden_size
    for layer in range(c.num_layers):
        at = f"layers.{layer}"
        qkv = layers.linear(g, f"{at}.attn.qkv", layers.layer_norm(g, f"{at}.attn_norm", x, c.norm_eps))
        q, k, v = (
            layers.heads_first(g, part, layers.heads(g, part, part, c.num_heads, c.head_dim))
            for part in g.split(f"{at}.attn.parts", qkv, (hidden, hidden, hidden))
        )
        mixed = layers.attention(
            g, f"{at}.attn", q, k, v, mask="mask.causal", scale=c.head_dim**-0.5, width=hidden
        )
        x = g.op(f"{at}.attended", "Add", x, layers.linear(g, f"{at}.attn.o", mixed))
        up = layers.linear(g, f"{at}.mlp.up", layers.layer_norm(g, f"{at}.mlp_norm", x, c.norm_eps))
        fed = layers.linear(g, f"{at}.mlp.down", layers.activation(g, f"{at}.mlp.active", c.activation, up))
        x = g.op(at, "Add", x, fed)
    x = layers.layer_norm(g, "norm", x, c.norm_eps)
    layers.matmul(g, "logits", x, "embed.weight" if c.tied_embeddings else "head.weight")


def _outgoing(config: Any) -> Outgoing:
    if isinstance(config, DecoderConfig) and config.num_experts:
        raise TranslationError(
            "layers with a mixture of experts are not written as a graph; export to SafeTensors or GGUF"
        )
    settings = {
        GRAPH: GRAPH_VERSION,
        FAMILY: config.family,
        MODEL: json.dumps(config.to_json(), ensure_ascii=False, separators=(",", ":")),
    }
    rules = tuple(Rule(name, (name,)) for name in config.parameters())
    return Outgoing("onnx", config.family, settings, rules, graph=partial(graph_of, config))


EXPORTERS = tuple(
    Exporter(family, "onnx", family, _outgoing) for family in (DecoderConfig.family, NanoGPTConfig.family)
)
