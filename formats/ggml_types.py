"""Every published ggml tensor type by number: name, block size, bytes, and whether we can decode it.

Numbers are never reused by ggml, so the removed ones stay in the table: a file that has them gets a message that says
what they are. Source: ``enum ggml_type`` and ``type_traits`` of ggml.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One ggml type. ``block`` elements take ``block_bytes`` bytes; ``dense`` names the equal dense encoding, if any."""

    number: int
    name: str
    block: int
    block_bytes: int
    dense: str | None = None
    decodable: bool = True
    removed: bool = False

    @property
    def encoding(self) -> str:
        """The name in the encoding registry: a dense one, or ``gguf.`` and the lower-case ggml name."""
        return self.dense or f"gguf.{self.name.lower()}"


def _dense(number: int, name: str, size: int, encoding: str) -> GgmlType:
    return GgmlType(number, name, 1, size, dense=encoding)


def _packed(number: int, name: str, block: int, size: int) -> GgmlType:
    return GgmlType(number, name, block, size)


def _named_only(number: int, name: str, block: int, size: int) -> GgmlType:
    return GgmlType(number, name, block, size, decodable=False)


def _removed(number: int, name: str, block: int, size: int) -> GgmlType:
    return GgmlType(number, name, block, size, decodable=False, removed=True)


GGML_TYPES: dict[int, GgmlType] = {
    kind.number: kind
    for kind in (
        _dense(0, "F32", 4, "f32"),
        _dense(1, "F16", 2, "f16"),
        _packed(2, "Q4_0", 32, 18),
        _packed(3, "Q4_1", 32, 20),
        _removed(4, "Q4_2", 16, 10),
        _removed(5, "Q4_3", 16, 12),
        _packed(6, "Q5_0", 32, 22),
        _packed(7, "Q5_1", 32, 24),
        _packed(8, "Q8_0", 32, 34),
        # Q8_1 and Q8_K are activation formats of ggml's dot products; files do not hold them in practice.
        _named_only(9, "Q8_1", 32, 36),
        _packed(10, "Q2_K", 256, 84),
        _packed(11, "Q3_K", 256, 110),
        _packed(12, "Q4_K", 256, 144),
        _packed(13, "Q5_K", 256, 176),
        _packed(14, "Q6_K", 256, 210),
        _named_only(15, "Q8_K", 256, 292),
        _packed(16, "IQ2_XXS", 256, 66),
        _packed(17, "IQ2_XS", 256, 74),
        _packed(18, "IQ3_XXS", 256, 98),
        _packed(19, "IQ1_S", 256, 50),
        _packed(20, "IQ4_NL", 32, 18),
        _packed(21, "IQ3_S", 256, 110),
        _packed(22, "IQ2_S", 256, 82),
        _packed(23, "IQ4_XS", 256, 136),
        _dense(24, "I8", 1, "i8"),
        _dense(25, "I16", 2, "i16"),
        _dense(26, "I32", 4, "i32"),
        _dense(27, "I64", 8, "i64"),
        _dense(28, "F64", 8, "f64"),
        _packed(29, "IQ1_M", 256, 56),
        _dense(30, "BF16", 2, "bf16"),
        _removed(31, "Q4_0_4_4", 32, 18),
        _removed(32, "Q4_0_4_8", 32, 18),
        _removed(33, "Q4_0_8_8", 32, 18),
        _packed(34, "TQ1_0", 256, 54),
        _packed(35, "TQ2_0", 256, 66),
        _removed(36, "IQ4_NL_4_4", 32, 18),
        _removed(37, "IQ4_NL_4_8", 32, 18),
        _removed(38, "IQ4_NL_8_8", 32, 18),
        _packed(39, "MXFP4", 32, 17),
        _packed(40, "NVFP4", 64, 36),
        _named_only(41, "Q1_0", 128, 18),
    )
}

#: First part of the encoding name of a number that nobody has published: ``gguf.type_200``.
UNKNOWN_PREFIX = "gguf.type_"


def decodable_names() -> list[str]:
    """The names of all ggml types whose values we can read, in number order."""
    return [kind.name for kind in GGML_TYPES.values() if kind.decodable]


def describe(number: int) -> str:
    """What the number is, for an error message: ``MXFP4 (39)``, ``Q4_2 (4, removed from ggml)``, ``unknown type 200``."""
    kind = GGML_TYPES.get(number)
    if kind is None:
        return f"unknown ggml type {number}"
    return f"{kind.name} ({number}, removed from ggml)" if kind.removed else f"{kind.name} ({number})"
