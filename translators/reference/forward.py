"""One forward pass over several sequences, so that every weight is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from oazoo.formats.source import WeightSource
from oazoo.translators.reference import maths
from oazoo.translators.reference.description import Decoder, Experts
from oazoo.translators.reference.maths import Array
from oazoo.translators.reference.weights import Weights

Ids = npt.NDArray[np.int64]


def decoder_logits(
    source: WeightSource, model: Decoder, sequences: Sequence[Ids], rounded: Mapping[str, str] | None = None
) -> list[Array]:
    """Logits after every token.

    Args:
        source: the checkpoint.
        model: what it means.
        sequences: ids, int64 [tokens] each.
        rounded: see :class:`~oazoo.translators.reference.weights.Weights`.

    Returns:
        float32 [tokens, vocabulary] for each sequence.
    """
    weights = Weights(source, rounded)
    run = _Run(weights, model, [len(ids) for ids in sequences])
    x = weights.gather(f"{model.embedding}.weight", np.concatenate(list(sequences)))
    x = x * np.float32(model.embedding_scale)
    if model.positions is not None:
        x = x + weights.gather(f"{model.positions}.weight", run.places)
    for layer in range(model.layers):
        x = run.layer(layer, x)
    x = run.norm(model.final_norm, x)
    logits = maths.softcap(weights.linear(model.head, x), model.logit_cap)
    return [logits[part] for part in run.parts]


class _Run:
    """What the layers of one pass share."""

    def __init__(self, weights: Weights, model: Decoder, lengths: Sequence[int]) -> None:
        self.w, self.m = weights, model
        ends = np.cumsum(lengths)
        #: Where each sequence lies among all tokens, and the position of each token in its own.
        self.parts = [slice(int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)]
        self.places: Ids = np.concatenate([np.arange(length) for length in lengths])

    def norm(self, name: str, x: Array) -> Array:
        """A norm over the last axis."""
        weight = self.w.vector(f"{name}.weight")
        if self.m.layer_norms:
            return maths.layer_norm(x, weight, self.w.optional(f"{name}.bias"), self.m.eps)
        return maths.rms_norm(x, weight + np.float32(self.m.norm_offset), self.m.eps)

    def layer(self, number: int, x: Array) -> Array:
        """The residual stream after a layer."""
        at = self.m.layer.format(number)
        names = {role: at + name for role, name in self.m.names.items()}

        def optional_norm(role: str, value: Array) -> Array:
            return self.norm(names[role], value) if role in names else value

        mixed = self._attention(number, names, optional_norm("attn_norm", x))
        mixed = optional_norm("attn_post_norm", mixed)
        if self.m.parallel:
            return x + mixed + self._feed_forward(number, names, optional_norm("mlp_norm", x))
        x = x + mixed
        fed = self._feed_forward(number, names, optional_norm("mlp_norm", x))
        return x + optional_norm("mlp_post_norm", fed)

    def _feed_forward(self, number: int, names: Mapping[str, str], x: Array) -> Array:
        experts = self.m.experts
        if experts is None or not experts.layers(number):
            return self._mlp(names, x)
        at = self.m.layer.format(number)
        return self._experts(experts, {role: at + name for role, name in experts.names.items()}, x)

    def _experts(self, e: Experts, names: Mapping[str, str], x: Array) -> Array:
        """Each token through its most probable experts, weighted by probability, and one for all tokens besides."""
        act = maths.ACTIVATIONS[self.m.activation]
        scores = self.w.linear(names["router"], x)
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        chosen = np.argsort(-odds, axis=1, kind="stable")[:, : e.per_token]
        shares = np.take_along_axis(odds, chosen, axis=1)
        if e.normalized:
            shares /= shares.sum(axis=1, keepdims=True)
        roles = ("gate_up", "down") if "gate_up" in names else ("gate", "up", "down")
        y = np.zeros_like(x)
        stacks = zip(*(self.w.matrices(names[role], e.count) for role in roles), strict=True)
        for number, matrices in enumerate(stacks):
            tokens, ranks = np.nonzero(chosen == number)
            if tokens.size:
                products = [x[tokens] @ matrix.T for matrix in matrices[:-1]]
                gate, up = products if len(products) == 2 else np.split(products[0], 2, axis=1)
                y[tokens] += (act(gate) * up) @ matrices[-1].T * shares[tokens, ranks][:, None]
        if "shared_scale" in names:
            roles = ("gate", "up", "down")
            shared = self._mlp({role: names[f"shared_{role}"] for role in roles}, x)
            y += shared / (1 + np.exp(-self.w.linear(names["shared_scale"], x)))
        return y

    def _attention(self, number: int, names: Mapping[str, str], x: Array) -> Array:
        m, tokens = self.m, len(x)
        q, k, v = self._qkv(names, x)
        q, k = (
            self._head_norm(names.get("q_norm"), q, m.heads),
            self._head_norm(names.get("k_norm"), k, m.kv_heads),
        )
        v = v.reshape(tokens, m.kv_heads, m.head_dim)
        if m.rotary is not None:
            q, k = self._rotated(number, q), self._rotated(number, k)
        factor = m.head_dim**-0.5 if m.attention_scale is None else m.attention_scale
        window = m.window(number)
        mixed = [
            maths.attention(q[part], k[part], v[part], factor, window, m.attention_cap) for part in self.parts
        ]
        return self.w.linear(names["o"], np.concatenate(mixed), m.transposed)

    def _rotated(self, number: int, x: Array) -> Array:
        """[tokens, heads, d] with every sequence turned by its own positions; its length can change the frequencies."""
        assert self.m.rotary is not None
        turned = []
        for part in self.parts:
            inverse, scale = self.m.rotary(number, part.stop - part.start)
            angle = self.places[part, None] * inverse[None, :]
            cos, sin = ((f(angle) * scale).astype(np.float32) for f in (np.cos, np.sin))
            turned.append(maths.rotate(x[part], cos, sin, self.m.interleaved))
        return np.concatenate(turned)

    def _qkv(self, names: Mapping[str, str], x: Array) -> tuple[Array, Array, Array]:
        m = self.m
        if "qkv" not in names:
            q, k, v = (self.w.linear(names[role], x, m.transposed) for role in ("q", "k", "v"))
            return q, k, v
        fused = self.w.linear(names["qkv"], x, m.transposed)
        if m.qkv == "by_head":
            by_head = fused.reshape(len(x), m.heads, 3, m.head_dim)
            return by_head[:, :, 0], by_head[:, :, 1], by_head[:, :, 2]
        queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
        q, k, v = np.split(fused, [queries, queries + keys], axis=1)
        return q, k, v

    def _head_norm(self, name: str | None, x: Array, heads: int) -> Array:
        """[tokens, heads, d], normalised as the weight's size says: over each head, or over all of them at once."""
        split = x.reshape(len(x), heads, self.m.head_dim)
        if name is None:
            return split
        if self.w.vector(f"{name}.weight").size == self.m.head_dim:
            return self.norm(name, split)
        return self.norm(name, x.reshape(len(x), -1)).reshape(split.shape)

    def _mlp(self, names: Mapping[str, str], x: Array) -> Array:
        act = maths.ACTIVATIONS[self.m.activation]
        if "gate_up" in names:
            gate, up = np.split(self.w.linear(names["gate_up"], x, self.m.transposed), 2, axis=1)
            inner = act(gate) * up
        else:
            inner = self.w.linear(names["up"], x, self.m.transposed)
            if "gate" in names:
                inner = act(self.w.linear(names["gate"], x, self.m.transposed)) * inner
            else:
                inner = act(inner)
        return self.w.linear(names["down"], inner, self.m.transposed)
