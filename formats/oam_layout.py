"""The fixed structures of an ``.oam`` file, shared by its reader and its writer: headers, codes, typed sections.

All integers are little-endian, all structures packed. Specification: the ``.oam`` format, wire versions 1 to 3.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats.messages import quoted

MAGIC = 0x004D414F
VERSION = 3
VERSIONS = (1, 2, 3)
MAX_SECTIONS = 32
PAGE = 4096
#: Our tensors start at multiples of this in the file.
ALIGNMENT = 64
MAX_NAME = 127
MAX_RANK = 8

FILE_HEADER = struct.Struct("<IIIIQQ32s")
SECTION_HEADER = struct.Struct("<IB3sIQQQQ20s")
ENTRY = struct.Struct("<128sQQBBBB4s8Q")
COUNT = struct.Struct("<II")
CONFIG = struct.Struct("<32s6IBBBB48s")
OPTIMIZER = struct.Struct("<16s5fqQ16s")
PROGRESS = struct.Struct("<B3sqQQffB3s32s32s")
#: Where the file header keeps its checksum.
CHECKSUM_AT = slice(24, 32)

CONFIG_SECTION, WEIGHTS, STATE, OPTIMIZER_SECTION, PROGRESS_SECTION, LEGACY = 1, 2, 3, 4, 5, 6
SECTION_NAMES = {
    1: "Config",
    2: "Weights",
    3: "State",
    4: "Optimizer",
    5: "Progress",
    6: "legacy kernel cache",
}

#: Dense encodings by dtype code.
DTYPES = (
    "f32 bf16 f16 i8 i32 u8 f64 i16 i64 u16 u32 u64 bool c64 c128".split()  # noqa: SIM905 - reads as the spec does
)
#: Block encodings by their code.
BLOCK_ENCODINGS = {1: "q4", 2: "q8"}
BLOCK_SIZE = 32

#: State tensors whose names begin so are files that travel with the model.
ASSET_PREFIX = "asset/"
#: Ours: types that ``.oam`` has no code for (f8, f4, f6) are stored as u8 and named in this asset, a JSON object
#: {tensor: {"encoding": …, "shape": […]}}. Other readers see u8 tensors.
CARRIED_ASSET = "asset/encodings.json"
CARRIED = (
    "f8_e4m3 f8_e5m2 f8_e8m0 f8_e4m3fnuz f8_e5m2fnuz f4_e2m1 f6_e2m3 f6_e3m2".split()  # noqa: SIM905
)

_U32 = 2**32 - 1
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class OamConfig:
    """The Config section: the architecture's name (at most 31 bytes), a few sizes, and its own configuration.

    ``payload`` belongs to the architecture; ours is one UTF-8 JSON object. Data types are dense encoding names.
    """

    architecture: str
    d_model: int = 0
    n_layers: int = 0
    vocab_size: int = 0
    weight_dtype: str = "f32"
    state_dtype: str = "f32"
    compute_dtype: str = "f32"
    payload: bytes = b""
    config_version: int = 1
    flags: int = 0

    def pack(self) -> bytes:
        """The section's bytes. Raises FormatError for a value that does not fit its field."""
        sizes = {
            "config version": self.config_version,
            "flags": self.flags,
            "d_model": self.d_model,
            "n_layers": self.n_layers,
            "vocab_size": self.vocab_size,
            "payload size": len(self.payload),
        }
        for name, value in sizes.items():
            if not 0 <= value <= _U32:
                raise FormatError(f"Config: {name} {value} does not fit 32 bits")
        codes = []
        for dtype in (self.weight_dtype, self.state_dtype, self.compute_dtype):
            if dtype not in DTYPES:
                raise FormatError(f"Config: {dtype!r} has no .oam dtype code; known: {', '.join(DTYPES)}")
            codes.append(DTYPES.index(dtype))
        architecture = pack_text(self.architecture, 32, "Config: architecture")
        if not self.architecture:
            raise FormatError("Config: architecture is empty")
        return CONFIG.pack(architecture, *sizes.values(), *codes, 0, b"") + self.payload

    @classmethod
    def unpack(cls, data: bytes) -> OamConfig:
        """The opposite of :meth:`pack`."""
        if len(data) < CONFIG.size:
            raise FormatError(f"Config: {len(data)} bytes; at least {CONFIG.size} are needed")
        name, version, flags, d_model, layers, vocab, size, *dtypes, _, _ = CONFIG.unpack_from(data)
        if len(data) != CONFIG.size + size:
            raise FormatError(
                f"Config: {len(data)} bytes, but the architecture config of {size} bytes makes {CONFIG.size + size}"
            )
        for code in dtypes:
            if code >= len(DTYPES):
                raise FormatError(f"Config: unknown dtype code {code}")
        weight, state, compute = (DTYPES[code] for code in dtypes)
        architecture = unpack_text(name, "Config: architecture")
        payload = data[CONFIG.size :]
        return cls(
            architecture,
            d_model,
            layers,
            vocab,
            weight,
            state,
            compute,
            payload,
            config_version=version,
            flags=flags,
        )


@dataclass(frozen=True)
class OamProgress:
    """The Progress section: how far training has come. The default is a model that was not trained here."""

    phase: int = 0
    step: int = 0
    bytes_seen: int = 0
    environment_steps: int = 0
    lr: float = 0.0
    best_metric: float = 0.0
    lower_is_better: bool = True
    metric_name: str = "loss"

    def pack(self) -> bytes:
        """The section's 104 bytes. Raises FormatError for a value that does not fit its field."""
        metric = pack_text(self.metric_name, 32, "Progress: metric name")
        try:
            return PROGRESS.pack(
                self.phase,
                b"",
                self.step,
                self.bytes_seen,
                self.environment_steps,
                self.lr,
                self.best_metric,
                self.lower_is_better,
                b"",
                metric,
                b"",
            )
        except (struct.error, OverflowError) as error:
            raise FormatError(f"Progress: {error}") from error

    @classmethod
    def unpack(cls, data: bytes) -> OamProgress:
        """The opposite of :meth:`pack`."""
        if len(data) != PROGRESS.size:
            raise FormatError(f"Progress: {len(data)} bytes; it has {PROGRESS.size}")
        phase, _, step, seen, environment, lr, best, lower, _, metric, _ = PROGRESS.unpack(data)
        name = unpack_text(metric, "Progress: metric name")
        return cls(phase, step, seen, environment, lr, best, bool(lower), name)


@dataclass(frozen=True, eq=False)
class OamOptimizer:
    """The Optimizer section. Moments are flat float32 in parameter order, ``[P]`` each, P the elements of all parameters.

    ``kind`` is "SGD", "Adam", "AdamW" or "Muon"; Muon has first moments only.
    """

    kind: str
    lr: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    step: int = 0
    first: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    second: Floats | None = None

    def pack_header(self) -> bytes:
        """The 68 bytes before the moments. Raises FormatError for what the format cannot hold."""
        if self.kind not in OPTIMIZER_MOMENTS:
            raise FormatError(f"Optimizer: unknown type {self.kind!r}; known: {', '.join(OPTIMIZER_MOMENTS)}")
        count = self.first.size
        wanted = OPTIMIZER_MOMENTS[self.kind]
        second = 0 if self.second is None else self.second.size
        if second != (count if wanted == 2 else 0):
            raise FormatError(
                f"Optimizer: {self.kind} with {count} first moments cannot have {second} second ones"
            )
        kind = pack_text(self.kind, 16, "Optimizer: type")
        hyper = (self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)
        try:
            return OPTIMIZER.pack(kind, *hyper, self.step, count, b"")
        except (struct.error, OverflowError) as error:
            raise FormatError(f"Optimizer: {error}") from error

    @property
    def moments(self) -> list[Floats]:
        """The moment vectors in file order."""
        return [self.first] if self.second is None else [self.first, self.second]


#: Moment vectors of each optimizer type.
OPTIMIZER_MOMENTS = {"SGD": 2, "Adam": 2, "AdamW": 2, "Muon": 1}


def pack_text(text: str, size: int, what: str) -> bytes:
    """``text`` for a NUL-terminated field of ``size`` bytes; FormatError if it does not fit."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"{what} {quoted(text)} is not valid Unicode") from error
    if b"\0" in data:
        raise FormatError(f"{what} {quoted(text)} holds a NUL character")
    if len(data) >= size:
        raise FormatError(
            f"{what} {quoted(text)} takes {len(data)} bytes; the format has room for {size - 1}"
        )
    return data


def unpack_text(data: bytes, what: str) -> str:
    """The text of a NUL-terminated field: terminated, UTF-8, and zero after its end."""
    text, end, rest = data.partition(b"\0")
    if not end:
        raise FormatError(f"{what} is not terminated")
    if any(rest):
        raise FormatError(f"{what} {text!r} has bytes after its terminator")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} {text!r} is not UTF-8") from error
