"""Typed model configurations: what a translator derives from a checkpoint and what a model is built from.

A configuration is plain, frozen data. ``to_json()``/``from_json()`` are strict: an unknown, missing or
ill-typed field, or a value outside its range, is a :class:`~oazoo.errors.TranslationError` that names the
field. A configuration that exists is therefore safe to size buffers with.

``parameters()`` gives the name and shape of every parameter of the model, in file order; it is the one
place where the shapes are written down.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from oazoo.errors import TranslationError

MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 14
MAX_POSITIONS = 1 << 28
#: More than any published dense model by a factor of ten; keeps every later product of sizes within 64 bits.
MAX_PARAMETERS = 1 << 44

ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "factors")
LAYER_TYPES = ("full", "sliding")
GELU_FORMS = ("gelu_tanh", "gelu")


def _check(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise TranslationError(f"{where}: {what}")


def _json_type_ok(value: Any, kind: Any) -> bool:
    """Whether a JSON value has the declared field type; an int may stand for a float, a bool for nothing."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_json_type_ok(value, option) for option in typing.get_args(kind))
    if origin is tuple:
        item = typing.get_args(kind)[0]
        return isinstance(value, (list, tuple)) and all(_json_type_ok(v, item) for v in value)
    if kind is types.NoneType:
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, Mapping)


def _type_name(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    return text.replace("NoneType", "null").replace("None", "null").replace("oazoo.configs.", "")


class _StrictJson:
    """Strict conversion of a frozen dataclass from and to plain JSON values."""

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values; fields that are ``None`` are left out."""
        result: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, _StrictJson):
                value = value.to_json()
            elif isinstance(value, tuple):
                value = list(value)
            result[field.name] = value
        return result

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Build from JSON values.

        Raises:
            TranslationError: not an object, unknown or missing field, wrong type, or value out of range.
        """
        where = cls.__name__
        _check(isinstance(data, Mapping), where, f"expected a JSON object, found {type(data).__name__}")
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in data:
            _check(name in fields, where, f"unknown field {str(name)[:64]!r}; known: {', '.join(fields)}")
        values: dict[str, Any] = {}
        for name, field in fields.items():
            if name not in data:
                required = (
                    field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                )
                _check(not required, where, f"field {name!r} is missing")
                continue
            value, kind = data[name], hints[name]
            _check(
                _json_type_ok(value, kind),
                where,
                f"field {name!r} must be {_type_name(kind)}, "
                f"found {type(value).__name__} ({str(value)[:40]})",
            )
            values[name] = cls._convert(value, kind)
        return cls(**values)

    @staticmethod
    def _convert(value: Any, kind: Any) -> Any:
        options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if value is None:
            return None
        if isinstance(value, Mapping):
            nested = next(o for o in options if isinstance(o, type) and issubclass(o, _StrictJson))
            return nested.from_json(value)
        if isinstance(value, (list, tuple)):
            item = typing.get_args(next(o for o in options if typing.get_origin(o) is tuple))[0]
            return tuple(_StrictJson._convert(v, item) for v in value)
        if isinstance(value, int) and not isinstance(value, bool) and int not in options and float in options:
            return _as_float(value)
        return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling(_StrictJson):
    """How the rotary inverse frequencies ``theta^(-2j/head_dim)`` are changed for long contexts.

    ``kind`` and the fields it uses:

    - ``linear``: positions divided by ``factor``.
    - ``dynamic``: NTK-aware growth of theta once a sequence exceeds ``original_max_positions``.
    - ``llama3``: ``factor``, ``low_freq_factor``, ``high_freq_factor``, ``original_max_positions``.
    - ``yarn``: ``factor``, ``original_max_positions``, ``beta_fast``, ``beta_slow``, ``truncate`` and, for
      the scale of cos and sin, ``attention_factor`` or ``mscale``/``mscale_all_dim`` (arXiv:2309.00071).
    - ``factors``: each inverse frequency divided by its entry of ``factors`` (head_dim/2 values; GGUF
      stores Llama 3's scaling so).
    """

    kind: str
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        where = "rope_scaling"
        _check(
            self.kind in ROPE_KINDS,
            where,
            f"unsupported kind {self.kind[:64]!r}; supported: none, {', '.join(ROPE_KINDS)}",
        )
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            _check(
                value is None or (math.isfinite(value) and 0 < value <= 1e6),
                where,
                f"{name} = {value} must be positive, at most 1e6",
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            _check(
                value is None or (math.isfinite(value) and 0 <= value <= 1e6),
                where,
                f"{name} = {value} is out of range",
            )
        original = self.original_max_positions
        _check(
            original is None or 0 < original <= MAX_POSITIONS,
            where,
            f"original_max_positions = {original} out of range",
        )
        if self.kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor", "original_max_positions"):
                _check(getattr(self, name) is not None, where, f"kind 'llama3' needs {name}")
            assert self.low_freq_factor is not None and self.high_freq_factor is not None
            _check(
                self.low_freq_factor < self.high_freq_factor,
                where,
                "low_freq_factor must be below high_freq_factor",
            )
        if self.kind in ("yarn", "dynamic"):
            _check(original is not None, where, f"kind {self.kind!r} needs original_max_positions")
        if self.kind == "factors":
            values = self.factors or ()
            _check(len(values) > 0, where, "kind 'factors' needs the list factors")
            _check(
                all(math.isfinite(v) and v > 0 for v in values),
                where,
                "factors must be finite and positive numbers",
            )
        else:
            _check(self.factors is None, where, f"kind {self.kind!r} does not take factors")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(_StrictJson):
    """A Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP (SwiGLU).

    ``sliding_window`` W: a token attends to itself and the W − 1 tokens before it, in the layers whose entry
    in ``layer_types`` is ``"sliding"`` (all layers when that is absent); see :meth:`layer_window`.
    """

    family: ClassVar[str] = "decoder"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        where = type(self).__name__
        _check(
            0 < self.num_kv_heads <= self.num_heads and self.num_heads % self.num_kv_heads == 0,
            where,
            f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}",
        )
        _check(
            0 < self.head_dim <= 8192 and self.head_dim % 2 == 0,
            where,
            f"head_dim = {self.head_dim} must be even, positive and at most 8192",
        )
        _check(self.num_heads * self.head_dim <= MAX_WIDTH, where, "num_heads × head_dim is too large")
        _check(
            math.isfinite(self.rope_theta) and 1 <= self.rope_theta <= 1e15,
            where,
            f"rope_theta = {self.rope_theta} is out of range (1 to 1e15)",
        )
        _check(
            self.activation == "silu",
            where,
            f"activation {self.activation[:64]!r} is not supported; supported: silu",
        )
        window = self.sliding_window
        _check(
            window is None or 0 < window <= MAX_POSITIONS, where, f"sliding_window = {window} is out of range"
        )
        if self.layer_types is not None:
            _check(
                len(self.layer_types) == self.num_layers,
                where,
                f"layer_types has {len(self.layer_types)} entries for num_layers = {self.num_layers}",
            )
            for kind in self.layer_types:
                _check(
                    kind in LAYER_TYPES, where, f"layer type {kind[:64]!r}; known: {', '.join(LAYER_TYPES)}"
                )
            _check(
                window is not None or "sliding" not in self.layer_types,
                where,
                "sliding layers need sliding_window",
            )
        if self.rope_scaling is not None and self.rope_scaling.factors is not None:
            _check(
                len(self.rope_scaling.factors) == self.head_dim // 2,
                where,
                f"rope_scaling.factors has {len(self.rope_scaling.factors)} values; "
                f"head_dim / 2 = {self.head_dim // 2}",
            )
        _check_parameter_count(self)

    def layer_window(self, layer: int) -> int | None:
        """Attention window of a layer in tokens, the current one included; ``None`` for full attention."""
        if self.sliding_window is None:
            return None
        if self.layer_types is not None and self.layer_types[layer] == "full":
            return None
        return self.sliding_window

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in file order; linear weights are [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            shapes[f"{at}.attn_norm.weight"] = (hidden,)
            linear(f"{at}.attn.q", q_rows, hidden, self.attention_bias)
            linear(f"{at}.attn.k", kv_rows, hidden, self.attention_bias)
            linear(f"{at}.attn.v", kv_rows, hidden, self.attention_bias)
            linear(f"{at}.attn.o", hidden, q_rows, self.attention_output_bias)
            shapes[f"{at}.mlp_norm.weight"] = (hidden,)
            linear(f"{at}.mlp.gate", inner, hidden, self.mlp_bias)
            linear(f"{at}.mlp.up", inner, hidden, self.mlp_bias)
            linear(f"{at}.mlp.down", hidden, inner, self.mlp_bias)
        shapes["norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTConfig(_StrictJson):
    """A GPT-2 style language model: LayerNorm, learned positions, fused qkv, GELU.

    ``bias``: whether the linear layers have one; ``norm_bias`` the same of the norms, ``None`` for as ``bias`` says.
    ``activation``: ``"gelu_tanh"`` (GPT-2), or ``"gelu"``, the exact form with erf (PyTorch's default).
    """

    family: ClassVar[str] = "nanogpt"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    bias: bool = True
    norm_bias: bool | None = None
    activation: str = "gelu_tanh"

    def __post_init__(self) -> None:
        _check_sizes(self)
        where = type(self).__name__
        _check(
            self.hidden_size % self.num_heads == 0,
            where,
            f"hidden_size = {self.hidden_size} must be a multiple of num_heads = {self.num_heads}",
        )
        _check(
            self.activation in GELU_FORMS,
            where,
            f"activation {self.activation[:64]!r} is not supported; supported: {', '.join(GELU_FORMS)}",
        )
        _check_parameter_count(self)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def has_norm_bias(self) -> bool:
        """Whether the norms have a bias."""
        return self.bias if self.norm_bias is None else self.norm_bias

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in file order; linear weights are [out, in]; qkv: q, k, v rows."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "embed.weight": (self.vocab_size, hidden),
            "positions.weight": (self.max_positions, hidden),
        }

        def add(name: str, bias: bool, *shape: int) -> None:
            shapes[f"{name}.weight"] = shape
            if bias:
                shapes[f"{name}.bias"] = shape[:1]

        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            add(f"{at}.attn_norm", self.has_norm_bias, hidden)
            add(f"{at}.attn.qkv", self.bias, 3 * hidden, hidden)
            add(f"{at}.attn.o", self.bias, hidden, hidden)
            add(f"{at}.mlp_norm", self.has_norm_bias, hidden)
            add(f"{at}.mlp.up", self.bias, inner, hidden)
            add(f"{at}.mlp.down", self.bias, hidden, inner)
        add("norm", self.has_norm_bias, hidden)
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes


ModelConfig = DecoderConfig | NanoGPTConfig

_FAMILIES: dict[str, type[DecoderConfig] | type[NanoGPTConfig]] = {
    cls.family: cls for cls in (DecoderConfig, NanoGPTConfig)
}


def config_from_json(family: Any, data: Any) -> ModelConfig:
    """The typed configuration of a model family from the JSON object stored in an ``.oam``.

    Raises:
        TranslationError: an unknown family, or a configuration that is not valid for it.
    """
    if not isinstance(family, str) or family not in _FAMILIES:
        raise TranslationError(f"unknown model family {str(family)[:64]!r}; known: {', '.join(_FAMILIES)}")
    return _FAMILIES[family].from_json(data)


def _check_sizes(config: ModelConfig) -> None:
    where = type(config).__name__
    limits = (
        ("vocab_size", MAX_VOCAB),
        ("hidden_size", MAX_WIDTH),
        ("intermediate_size", MAX_WIDTH * 4),
        ("num_layers", MAX_LAYERS),
        ("num_heads", MAX_HEADS),
        ("max_positions", MAX_POSITIONS),
    )
    for name, limit in limits:
        value = getattr(config, name)
        _check(0 < value <= limit, where, f"{name} = {str(value)[:40]} is out of range (1 to {limit})")
    eps = config.norm_eps
    _check(math.isfinite(eps) and 0 <= eps < 1, where, f"norm_eps = {eps} is out of range (0 to 1)")


def _check_parameter_count(config: ModelConfig) -> None:
    """Bound the whole model before anything is sized by it (per layer, so no long dictionary is built)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    rough = 2 * config.vocab_size * hidden + config.num_layers * hidden * (4 * heads + 3 * inner)
    if isinstance(config, NanoGPTConfig):
        rough += config.max_positions * hidden
    _check(
        rough <= MAX_PARAMETERS,
        type(config).__name__,
        f"about {rough:.3g} parameters, more than the {MAX_PARAMETERS:.3g} this program accepts",
    )
