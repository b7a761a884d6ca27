"""What quantising would do with each tensor of a file, decided and checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from oazoo.errors import UsageError
from oazoo.formats import encodings
from oazoo.formats.oam import OamSource
from oazoo.formats.source import SourceTensor

#: Encodings that pack weights into blocks of 32, and those that a packed tensor is unpacked to.
BLOCKS = ("q4", "q8")
DENSE = ("f16", "bf16", "f32")
TARGETS = (*BLOCKS, *DENSE)
#: Dense types that are packed; anything else of rank 2 or more stays as it is and is listed.
_PACKED_TYPES = ("f32", "f16", "bf16")
KEPT = "asked to keep"
#: Weights that are small and feel every rounding, by our names and by those of ``--arch raw``; they are never packed.
_NEVER = (
    (
        (
            "*.moe.router.*",
            "*.moe.shared_gate.*",
            "*.shared_expert_gate.*",
            "*.ffn_gate_inp*",
            "*.block_sparse_moe.gate.*",
            "model.layers.*.mlp.gate.weight",
        ),
        "routes tokens to experts",
    ),
    (
        (
            "*.a_log",
            "*.mixer.a",
            "*.A_log",
            "*.ssm_a",
            "*.mixer.[dD]",
            "*.dt_bias",
            "*.[bBcC]_bias",
            "*.mimo_[xzo]",
            "*.mixer.norm_weight",
        ),
        "state of a recurrence",
    ),
    (("*.mixer.conv.*", "*.conv1d.*", "*.ssm_conv1d.*"), "short convolution"),
)


@dataclass(frozen=True)
class TensorQuantization:
    """What happens to one tensor: encodings before and after, bytes before and after, and why if it is kept."""

    name: str
    shape: tuple[int, ...]
    source: str
    target: str
    bytes_before: int
    bytes_after: int
    reason: str = ""


@dataclass(frozen=True)
class Request:
    """What is asked of each tensor.

    Attributes:
        target: what tensors become that nothing else is said about, one of ``TARGETS``.
        keep: shell-style patterns of names that stay as they are.
        q8: of names that are packed to Q8 where the target is Q4.
        allow_requantize: pack what is Q8 already to Q4, from values that have lost already.
        chosen: by name, ``q4``, ``q8`` or ``dense``: what a budget was spent on. Patterns are stronger.
    """

    target: str
    keep: Sequence[str] = ()
    q8: Sequence[str] = ()
    allow_requantize: bool = False
    chosen: Mapping[str, str] | None = None


def plan(source: OamSource, request: Request) -> list[TensorQuantization]:
    """What would become of each weight.

    To q4 or q8, dense f32, f16 and bf16 tensors of rank 2 and more are packed, as OA does; the rest stays as it is. So do
    tensors that are quantised already (an importer may have taken some over without loss), because packing them again
    would add the errors up; ``allow_requantize`` packs those of Q8 to Q4 all the same. To a dense type, tensors that are
    quantised are unpacked, and all others stay.

    Raises:
        UsageError: an unknown target, a pattern that matches nothing, nothing to do, or a source that is quantised already.
    """
    target = request.target
    if target not in TARGETS:
        raise UsageError(f"unknown target {target!r}; there are {', '.join(TARGETS)}")
    if target in DENSE and (request.q8 or request.allow_requantize):
        raise UsageError(
            f"unpacking to {target} packs nothing: --q8 and --allow-requantize do not go with it"
        )
    for option, patterns in (("--keep", request.keep), ("--q8", request.q8)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in source):
                raise UsageError(
                    f"{option} {pattern!r} matches no tensor of {source.path}; `oazoo inspect` lists them"
                )
    steps = [_step(tensor, request) for tensor in source.values()]
    if all(step.reason for step in steps):
        raise UsageError(_nothing(source, request, steps))
    return steps


def _nothing(source: OamSource, request: Request, steps: Sequence[TensorQuantization]) -> str:
    """Why a plan does nothing."""
    if any(step.reason == KEPT for step in steps):
        return f"--keep leaves nothing in {source.path} that would be packed"
    already = [step for step in steps if step.source in BLOCKS]
    if request.target in DENSE:
        return (
            f"nothing in {source.path} is quantised, so there is nothing to unpack; oazoo convert --dtype changes the type "
            "of dense tensors"
        )
    if not already:
        return f"nothing in {source.path} would be packed; `oazoo inspect` lists its tensors"
    what = (
        f"{source.path} is quantised already: {len(already)} tensors, the first is {already[0].name} "
        f"({already[0].source}), and nothing dense is left."
    )
    if request.target == "q4" and any(step.source == "q8" for step in already):
        return (
            f"{what} Packing it again would add the errors up: quantize the dense model; if there is none, "
            "--allow-requantize packs what is q8 to q4"
        )
    return (
        f"{what} Packing it to {request.target} again could only lose more; --to f16 unpacks it, and the dense model can be "
        "quantized to anything"
    )


def _never(name: str) -> str:
    """Why a weight of this name stays dense; empty if it does not have to."""
    return next((why for patterns, why in _NEVER if any(fnmatchcase(name, p) for p in patterns)), "")


def _step(tensor: SourceTensor, request: Request) -> TensorQuantization:
    info = tensor.info
    target, reason = request.target, ""
    chosen = request.chosen.get(info.name) if request.chosen is not None else None
    if chosen is not None and chosen in BLOCKS:
        target = chosen
    if any(fnmatchcase(info.name, pattern) for pattern in request.q8):
        target, chosen = "q8", None
    if any(fnmatchcase(info.name, pattern) for pattern in request.keep):
        reason = KEPT
    elif target in DENSE:
        reason = "" if info.encoding in BLOCKS else f"{info.encoding} already"
    elif info.encoding in BLOCKS and not (
        request.allow_requantize and (info.encoding, target) == ("q8", "q4")
    ):
        reason = f"already {info.encoding}"
    elif len(info.shape) < 2:
        reason = "fewer than 2 dimensions"
    elif never := _never(info.name):
        reason = f"never packed: {never}"
    elif info.encoding not in (*_PACKED_TYPES, *BLOCKS):
        reason = f"{info.encoding} is not packed"
    elif info.numel == 0:
        reason = "no elements"
    elif chosen == "dense":
        reason = "the budget has room"
    after = info.nbytes if reason else encodings.get(target).bytes_for(info.shape)
    kind = info.encoding if reason else target
    return TensorQuantization(info.name, info.shape, info.encoding, kind, info.nbytes, after, reason)
