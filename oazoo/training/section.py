"""An optimizer's state as the Optimizer section of an `.oam` file has it, and back.

The section holds the settings of one group, the number of steps, and the moments, flat in the order of the parameters: SGD's
momentum, or nothing without it (its second vector, which the format has room for, is zero), both moments of Adam and AdamW,
Muon's momentum. What else an optimizer is told (compat, nesterov, groups that differ) belongs to the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.formats.oam_layout import OamOptimizer
from oazoo.training.optimizer import Optimizer

_FIELDS = ("m", "v")


def to_section(optimizer: Optimizer) -> OamOptimizer:
    """The section for an optimizer as it stands; waits for the device. The settings are those of its first group.

    Raises:
        UsageError: the format has no such optimizer.
    """
    if not optimizer.kind:
        raise UsageError(f"an .oam file cannot hold the state of {type(optimizer).__name__}")
    options = optimizer.groups[0].options
    beta1, beta2 = options.get("betas", (options.get("momentum", 0.0), 0.0))
    state = optimizer.state_dict()
    first, second = (_flat(optimizer, state["moments"], field) for field in _FIELDS)
    if optimizer.kind == "Muon":
        vectors: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None] = first, None
    else:
        vectors = first, second if second.size == first.size else np.zeros_like(first)
    return OamOptimizer(
        optimizer.kind,
        options["lr"],
        beta1,
        beta2,
        options.get("eps", 0.0),
        options["weight_decay"],
        state["steps"],
        *vectors,
    )


def from_section(
    optimizer: Optimizer, section: OamOptimizer, groups: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Continue from a section: its settings, steps and moments; nothing is changed unless all of it fits.

    Args:
        optimizer: over the same parameters in the same order as when the section was written.
        section: read from a file, or from :func:`to_section`.
        groups: the settings of each group, as ``state_dict()["groups"]`` had them; from the section if None, which then
            all groups get.

    Raises:
        UsageError: another kind of optimizer or other parameters, missing moments, settings out of range.
    """
    if section.kind != optimizer.kind:
        raise UsageError(f"the file holds the state of {section.kind}, not of {optimizer.kind or 'NoOp'}")
    if groups is None:
        names = [[p.name for p in group.parameters] for group in optimizer.groups]
        told = _settings(section)
        groups = [
            {"params": params, **group.options, **{k: v for k, v in told.items() if k in group.options}}
            for params, group in zip(names, optimizer.groups, strict=True)
        ]
    else:
        groups = [
            {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in g.items()}
            for g in groups
        ]
    moments: dict[str, dict[str, npt.NDArray[np.float32]]] = {p.name: {} for p in optimizer.parameters}
    for field, vector in zip(_FIELDS, (section.first, section.second), strict=True):
        kept = [p for group in optimizer.groups for p in group.parameters if field in optimizer.kept(group)]
        total, found = sum(p.tensor.numel for p in kept), 0 if vector is None else vector.size
        empty = field == "v" and not kept  # SGD's second vector
        if not empty and found != total:
            raise UsageError(
                f"the file holds {found:,} moments of {section.kind}; these parameters have {total:,}: they are others, or "
                "the state was not saved"
            )
        at = 0
        for parameter in kept:
            assert vector is not None
            end = at + parameter.tensor.numel
            moments[parameter.name][field] = vector[at:end].reshape(parameter.tensor.shape)
            at = end
    optimizer.load_state_dict(
        {
            "kind": type(optimizer).__name__,
            "compat": optimizer.compat,
            "steps": section.step,
            "groups": groups,
            "moments": moments,
        }
    )


def _settings(section: OamOptimizer) -> dict[str, Any]:
    return {
        "lr": section.lr,
        "betas": (section.beta1, section.beta2),
        "momentum": section.beta1,
        "eps": section.eps,
        "weight_decay": section.weight_decay,
    }


def _flat(
    optimizer: Optimizer, moments: Mapping[str, Mapping[str, npt.NDArray[np.float32]]], field: str
) -> npt.NDArray[np.float32]:
    """One moment of all parameters, in their order: float32 [elements]."""
    found = [moments[p.name][field].reshape(-1) for p in optimizer.parameters if field in moments[p.name]]
    return np.concatenate(found) if found else np.empty(0, np.float32)
