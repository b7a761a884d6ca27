"""Optimizer sections of `.oam` files: what OA wrote comes back byte for byte, and what we write a strict reader accepts."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig, OamOptimizer, OamProgress
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.runtime import Tensor, get_device
from oazoo.training import SGD, Adam, AdamW, Muon, NoOp, Optimizer
from oazoo.training.section import from_section, to_section

DATA = Path(__file__).parent.parent / "data" / "oa"
KINDS: dict[str, Callable[..., Optimizer]] = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW, "Muon": Muon}


@pytest.fixture(scope="module")
def oamref() -> ModuleType:
    """The independent strict reader of the `.oam` container."""
    spec = importlib.util.spec_from_file_location("oamref", DATA.parent / "oamref.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters(arrays: Sequence[npt.NDArray[np.float32]]) -> list[tuple[str, Tensor]]:
    tensors = [Tensor.from_numpy(get_device(), np.asarray(a, np.float32)) for a in arrays]
    for tensor in tensors:
        tensor.requires_grad = True
    return [(f"p{index}", tensor) for index, tensor in enumerate(tensors)]


def payload(section: OamOptimizer) -> bytes:
    return section.pack_header() + b"".join(moments.astype("<f4").tobytes() for moments in section.moments)


@pytest.mark.parametrize("path", sorted(DATA.glob("oam_*.oam")), ids=lambda path: path.stem)
def test_what_oa_wrote_comes_back_byte_for_byte(path: Path) -> None:
    source = OamSource(path)
    section = source.optimizer
    assert section is not None
    weights = parameters([source[f"p{i}"].numpy() for i in range(len(source))])
    optimizer = KINDS[section.kind](weights, compat="oa")
    from_section(optimizer, section)
    assert optimizer.steps_taken == section.step
    stored = source.sections[4]
    assert payload(to_section(optimizer)) == bytes(source.section_bytes(4, 0, stored.size))
    with np.load(path.with_suffix(".npz")) as data:
        assert optimizer.groups[0].options["lr"] == np.float32(json.loads(str(data["config"]))["lr"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.75, "weight_decay": 0.5}),
        ("Adam", {"betas": (0.5, 0.25)}),
        ("AdamW", {"eps": 0.125}),
        ("Muon", {"momentum": 0.5}),
    ],
)
def test_a_strict_reader_takes_what_we_write(
    kind: str, options: dict[str, Any], tmp_path: Path, oamref: ModuleType
) -> None:
    rng = np.random.default_rng(0)
    named = parameters([rng.standard_normal(shape).astype(np.float32) for shape in [(3, 5), (7,), (4, 2)]])
    optimizer = KINDS[kind](named, 0.25, **options)
    for _ in range(3):
        for _, tensor in named:
            tensor.grad = Tensor.from_numpy(
                get_device(), rng.standard_normal(tensor.shape).astype(np.float32)
            )
        optimizer.step()
    path = tmp_path / "checkpoint.oam"
    entries = [OamEntry(name, tensor.shape, "f32") for name, tensor in named]
    with OamWriter(
        path,
        config=OamConfig("RustModule"),
        entries=entries,
        optimizer=to_section(optimizer),
        progress=OamProgress(step=3),
    ) as writer:
        for name, tensor in named:
            writer.write(name, tensor.numpy())

    read = oamref.load(path)["opt"]
    state = optimizer.state_dict()
    beta1, beta2 = options.get("betas", (options.get("momentum", 0.0), 0.0))
    if kind == "AdamW":
        beta1, beta2 = np.float32(0.9), np.float32(0.999)
    assert (read["type"], read["step"]) == (kind, 3)
    assert read["hyper"][:3] == (0.25, beta1, beta2)
    assert read["hyper"][4] == np.float32(optimizer.groups[0].options["weight_decay"])
    fields = {"SGD": "m" if "momentum" in options else "", "Muon": "m"}.get(kind, "mv")
    vectors = [np.concatenate([state["moments"][n][f].ravel() for n, _ in named]) for f in fields]
    if kind == "SGD" and vectors:
        vectors.append(np.zeros_like(vectors[0]))
    assert read["payload"] == b"".join(v.astype("<f4").tobytes() for v in vectors)
    assert read["n"] == (30 if fields else 0)

    section = OamSource(path).optimizer
    assert section is not None
    again = KINDS[kind](named, 0.125, **options)
    from_section(again, section)
    loaded = again.state_dict()
    assert loaded["steps"] == 3
    for name, kept in state["moments"].items():
        for field, values in kept.items():
            assert values.any()
            np.testing.assert_array_equal(loaded["moments"][name][field], values)


def test_groups_keep_their_settings() -> None:
    (a, b) = parameters([np.ones(3, np.float32), np.ones((2, 2), np.float32)])

    def build() -> Optimizer:
        return AdamW([{"params": [a], "lr": 0.5, "weight_decay": 0.0}, {"params": [b], "betas": (0.5, 0.75)}])

    optimizer = build()
    optimizer.set_lr(0.25, group=1)
    section, groups = to_section(optimizer), json.loads(json.dumps(optimizer.state_dict()["groups"]))
    again = build()
    from_section(again, section, groups)
    assert [g.options for g in again.groups] == [g.options for g in optimizer.groups]
    assert again.groups[1].options["betas"] == (0.5, 0.75)


def test_sections_that_do_not_fit_are_refused_and_change_nothing() -> None:
    named = parameters([np.ones((2, 3), np.float32), np.ones(4, np.float32)])
    optimizer = Adam(named, 0.5)
    good = to_section(optimizer)
    odd: list[tuple[OamOptimizer, str]] = [
        (dataclasses.replace(good, kind="AdamW"), "state of AdamW, not of Adam"),
        (dataclasses.replace(good, first=good.first[:9], second=good.first[:9]), "9 moments"),
        (dataclasses.replace(good, first=good.first[:0], second=good.first[:0]), "0 moments"),
        (dataclasses.replace(good, lr=float("nan")), "lr must be"),
        (dataclasses.replace(good, beta2=1.0), "betas must be"),
        (dataclasses.replace(good, step=-1), "-1 steps"),
        (dataclasses.replace(good, step=2**40), "steps cannot"),
    ]
    for section, message in odd:
        with pytest.raises(UsageError, match=message):
            from_section(optimizer, section)
    assert optimizer.steps_taken == 0 and optimizer.groups[0].options["lr"] == 0.5
    with pytest.raises(UsageError, match="cannot hold the state of NoOp"):
        to_section(NoOp(named))
