"""Tensor names over the 127 bytes of an ``.oam`` entry: stored shortened, shown in full, and never believed unchecked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_targets import mended_oam

from oazoo.errors import FormatError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_names import shortened, stored_names
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.formats.safetensors_writer import export_safetensors

OURS = OamConfig("raw", payload=b'{"oazoo":1,"family":"raw","model":{}}')
LONG = ["x" * 128, "x" * 200, "é" * 64, "x" * 199 + "y", "🙂" * 40, "a" * 102 + "é" * 30]


def write(path: Path, names: list[str], config: OamConfig = OURS, encoding: str = "f32") -> Path:
    with OamWriter(path, config=config, entries=[OamEntry(name, (2,), encoding) for name in names]) as writer:
        for number, name in enumerate(names):
            writer.write(name, np.full(2, number, {"f32": np.float32, "f8_e4m3": np.uint8}[encoding]))
    return path


def by_hand(name: str) -> str:
    """The documented short form, computed apart from the product."""
    data = name.encode()
    end = 102
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end].decode() + "~" + hashlib.sha256(data).hexdigest()[:24]


def test_full_names_go_in_and_come_out(tmp_path: Path) -> None:
    names = ["x" * 127, *LONG]
    with OamSource(write(tmp_path / "a.oam", names)) as source:
        assert list(source) == names
        assert [tensor.info.name for tensor in source.values()] == names
        assert [int(tensor.numpy()[0]) for tensor in source.values()] == list(range(len(names)))
        assert source.metadata["names"] == {by_hand(name): name for name in LONG}


def test_another_reader_sees_short_unique_names(tmp_path: Path, oamref: Any) -> None:
    path = write(tmp_path / "a.oam", ["w", *LONG])
    assert [tensor["name"] for tensor in oamref.load(path)["weights"]] == ["w", *map(by_hand, LONG)]


def test_types_that_are_carried_keep_their_names(tmp_path: Path) -> None:
    with OamSource(write(tmp_path / "a.oam", LONG, encoding="f8_e4m3")) as source:
        assert {name: tensor.info.encoding for name, tensor in source.items()} == dict.fromkeys(
            LONG, "f8_e4m3"
        )
        export_safetensors(source, tmp_path / "a.safetensors")
    with SafetensorsSource(tmp_path / "a.safetensors") as source:
        assert set(source) == set(LONG)


def test_a_short_form_that_is_taken(tmp_path: Path) -> None:
    """Somebody names a tensor as a long one would be stored: the long one is stored otherwise, and both are kept."""
    name = "n" * 300
    forms = list(shortened(name))
    names = [forms[0], name, forms[1]]
    with OamSource(write(tmp_path / "a.oam", names)) as source:
        assert list(source) == names
        assert source.metadata["names"] == {forms[2]: name}
    with pytest.raises(FormatError, match="cannot be shortened"):
        stored_names([name, *forms])


def test_config_of_another_program_has_no_place_for_names(tmp_path: Path) -> None:
    for payload in (b"", b"\x01\x02", b'{"other":1}', b"{damaged"):
        with pytest.raises(FormatError, match="over 127 bytes, which only a config of oazoo's own"):
            write(tmp_path / "a.oam", ["w" * 128], OamConfig("x", payload=payload))
        write(tmp_path / "b.oam", ["w" * 127], OamConfig("x", payload=payload))
        with OamSource(tmp_path / "b.oam") as source:
            assert source.config.payload == payload
        (tmp_path / "b.oam").unlink()


def test_mapping_of_tensors_that_are_gone_is_dropped(tmp_path: Path) -> None:
    payload = json.dumps({"oazoo": 1, "names": {by_hand("w" * 128): "w" * 128}}).encode()
    with OamSource(write(tmp_path / "a.oam", ["w"], OamConfig("x", payload=payload))) as source:
        assert list(source) == ["w"] and "names" not in source.metadata


def test_names_that_cannot_be_stored(tmp_path: Path) -> None:
    for name, said in (("a" * 4097, "over 4096 characters"), ("\ud800" * 200, "not valid Unicode")):
        with pytest.raises(FormatError, match=said):
            write(tmp_path / "a.oam", [name])
    with pytest.raises(FormatError, match="comes twice"):
        write(tmp_path / "a.oam", ["w" * 200, "w" * 200])
    with pytest.raises(FormatError, match=r"config of .* characters; at most 16777216"):
        write(tmp_path / "a.oam", [f"{number:04}" + "w" * 4092 for number in range(4200)])


SHORT = by_hand("w" * 200)
HOSTILE = [
    ({"v": "embed.weight"}, "is not how 'embed.weight' is shortened"),  # a rename of any tensor
    ({"v": "w" * 200}, "is not how"),
    ({SHORT: "w" * 201}, "is not how"),
    ({SHORT: "v"}, "is not how"),
    ({SHORT: ""}, "is not how"),
    ({SHORT: 7}, "is no tensor name"),
    ({SHORT: None}, "is no tensor name"),
    ({SHORT: "w" * 5000}, "is no tensor name"),
    ({SHORT: "w\0" * 100}, "is no tensor name"),
    ({SHORT: "\ud800" * 100}, "not valid Unicode"),
    ({"gone": "w" * 200}, "is not a weight of this file"),
    ({SHORT: "w" * 200, by_hand("q" * 200): "q" * 200}, "is not a weight of this file"),
    ({SHORT: "w" * 200, list(shortened("w" * 200))[1]: "w" * 200}, "two tensors are named"),
    ([], "must be an object"),
    ("x", "must be an object"),
    (None, "must be an object"),
]


@pytest.mark.parametrize(("mapping", "said"), HOSTILE)
def test_a_hostile_mapping_is_refused(mapping: Any, said: str, tmp_path: Path, oamref: Any) -> None:
    forms = list(shortened("w" * 200))
    path = write(tmp_path / "a.oam", [forms[0], forms[1], "v"], OamConfig("raw", payload=b"{" + b" " * 6000))
    # Behind the writer's back: the payload, then the checksums.
    text = json.dumps({"oazoo": 1, "names": mapping}).encode()
    data = bytearray(path.read_bytes())
    start = data.index(b"{" + b" " * 6000)
    data[start : start + 6001] = text.ljust(6001)
    path.write_bytes(mended_oam(bytes(data)))
    with pytest.raises(FormatError, match=said) as refused:
        OamSource(path)
    assert str(path) in str(refused.value) and len(str(refused.value)) < 1500
