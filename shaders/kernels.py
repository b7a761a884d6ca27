"""The table of compiled kernels: name → Slang module, entry point (with its generic arguments), macros."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """What to compile: `entry` of `module`.slang.

    `defines` are macros for what Slang cannot make generic; `precise` forbids the driver to contract or reorder
    floating-point arithmetic.
    """

    module: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()
    precise: bool = False


#: Encodings that matrix kernels read, and the Slang type of each (weights.slang).
WEIGHTS = {"f32": "F32W", "f16": "F16W", "bf16": "BF16W", "q8": "Q8W", "q4": "Q4W"}
#: Columns of a lane in linear's lanes variant; more in the kernels that leave scaling to the end of a block.
COLUMNS, CODED_COLUMNS = 2, 4
#: Head widths that have an attention kernel of their own for CPU devices.
LANES_HEAD_DIMS = (32, 64, 128)


def _linear() -> dict[str, KernelSpec]:
    """linear and gated, in three variants: lanes (8-lane CPU devices; 1 or 8 rows, norm folded in or not), group, tile."""
    table: dict[str, KernelSpec] = {}
    for encoding, weight in WEIGHTS.items():
        for form in ("linear", "gated"):
            for rows, norm in ((1, 0), (1, 1), (8, 0)):
                name = f"{form}_lanes{rows}{'_norm' if norm else ''}_{encoding}"
                columns = CODED_COLUMNS if rows == 1 and encoding in ("q8", "q4") else COLUMNS
                table[name] = KernelSpec("linear_lanes", f"{form}<{weight},{rows},{columns},{norm}>")
            table[f"{form}_group_{encoding}"] = KernelSpec("linear_group", f"{form}<{weight}>")
            table[f"{form}_tile_{encoding}"] = KernelSpec("linear_tile", f"{form}<{weight}>")
    return table


def _rows() -> dict[str, KernelSpec]:
    """What works on rows of activations: norms, attention, embedding, rotary, activations."""
    table: dict[str, KernelSpec] = {}
    for lanes in ("Wave8", "Group32"):
        for name, entry in (("rms_norm", "rms"), ("layer_norm", "layer")):
            table[f"{name}_{lanes.lower()}"] = KernelSpec("norm", f"{entry}{lanes}")
    for encoding, weight in WEIGHTS.items():
        table[f"embedding_{encoding}"] = KernelSpec("embedding", f"embed<{weight}>")
        table[f"decode_{encoding}"] = KernelSpec("embedding", f"decode<{weight}>")
    for dim in LANES_HEAD_DIMS:
        table[f"attention_lanes_{dim}"] = KernelSpec("attention", f"attendLanes<{dim},0>")
        table[f"attention_step_{dim}"] = KernelSpec("attention", f"attendLanes<{dim},1>")
    table["attention_group"] = KernelSpec("attention", "attendGroup")
    table["attention_part"] = KernelSpec("attention", "attendPart")
    table["attention_join"] = KernelSpec("attention", "joinParts")
    table["argmax"] = KernelSpec("argmax", "argmax")
    table["rope_and_cache"] = KernelSpec("rope", "ropeAndCache")
    table["silu_mul"] = KernelSpec("activation", "siluMul")
    table["gelu_tanh"] = KernelSpec("activation", "geluTanh")
    table["gelu_erf"] = KernelSpec("gelu", "geluErf")
    return table


KERNELS: dict[str, KernelSpec] = {
    **_rows(),
    "add_f32": KernelSpec("elementwise", "add"),
    **{
        f"pack_{target}_{source}": KernelSpec(
            "pack", f"pack{target.upper()}<{source.upper()}Source>", precise=True
        )
        for target in ("q4", "q8")
        for source in ("f32", "f16", "bf16")
    },
    **{
        f"encode_q4_{source}": KernelSpec("encode", f"encodeQ4<{source.upper()}Source>")
        for source in ("f32", "f16", "bf16")
    },
    **_linear(),
}
