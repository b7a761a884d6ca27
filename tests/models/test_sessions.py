"""Sessions: prompts in chunks, captured decoding, going back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_goldens import reference

import oazoo
from oazoo.errors import DeviceError, FormatError, GenerationError, TranslationError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.models import session as module

Converted = Callable[[str], Path]


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "Q8_0"])
def test_every_way_of_feeding_gives_the_same_logits(
    name: str, converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.atleast_2d(reference(name)[0])[0].astype(np.int32)
    model = oazoo.load(converted(name)).model
    wanted = model.logits(ids)
    # One by one, through the captured step.
    session = model.new_session(len(ids))
    one_by_one = np.stack([session.decode(int(i)) for i in ids])
    assert session.position == len(ids)
    assert np.abs(one_by_one - wanted).max() < 2e-5
    # A prompt, then decoding.
    session = model.new_session(len(ids))
    assert np.abs(session.prefill(ids[:10]) - wanted[9]).max() < 2e-5
    for at in range(10, len(ids)):
        assert np.abs(session.decode(int(ids[at])) - wanted[at]).max() < 2e-5
    # Going back, and on with another text and with the first one again.
    session.truncate(7)
    session.decode(3)
    session.truncate(7)
    assert np.abs(session.prefill(ids[7:]) - wanted[-1]).max() < 2e-5
    # In chunks of 5.
    monkeypatch.setattr(module, "CHUNK", 5)
    session = model.new_session(len(ids))
    assert np.abs(session.prefill(ids) - wanted[-1]).max() < 2e-5
    assert np.abs(model.logits(ids) - wanted).max() < 2e-5


def test_sessions_do_not_disturb_each_other(converted: Converted) -> None:
    model = oazoo.load(converted("llama")).model
    ids = reference("llama")[0].astype(np.int32)
    wanted = model.logits(ids)
    assert wanted.shape == (2, 24, 160)
    first, second = model.new_session(24), model.new_session(24)
    for at in range(24):
        assert np.abs(first.decode(int(ids[0, at])) - wanted[0, at]).max() < 2e-5
        assert np.abs(second.decode(int(ids[1, at])) - wanted[1, at]).max() < 2e-5


def test_what_is_refused(converted: Converted) -> None:
    model = oazoo.load(converted("gpt2")).model
    with pytest.raises(GenerationError, match="has 64 positions"):
        model.new_session(65)
    with pytest.raises(GenerationError, match="integers"):
        model.logits(np.zeros((1, 1, 1), np.int32))
    with pytest.raises(GenerationError, match="at least one"):
        model.logits([])
    with pytest.raises(GenerationError, match="token id 160 is outside"):
        model.logits([1, 160])
    session = model.new_session(4)
    with pytest.raises(GenerationError, match="room for 4 tokens"):
        session.prefill(np.arange(5, dtype=np.int32))
    session.prefill(np.arange(3, dtype=np.int32))
    with pytest.raises(GenerationError, match="token id -1 is outside"):
        session.decode(-1)
    session.decode(1)
    with pytest.raises(GenerationError, match="4 are fed and 1 more"):
        session.decode(1)
    with pytest.raises(GenerationError, match="cannot go back to position 9"):
        session.truncate(9)
    session.close()
    session.close()
    with pytest.raises(GenerationError, match="closed"):
        session.decode(1)


def test_sessions_give_their_memory_back(converted: Converted) -> None:
    text_model = oazoo.load(converted("llama"))
    device = text_model.model.device
    device.synchronize()
    before = device.allocator.allocated_bytes
    for _ in range(5):
        session = text_model.model.new_session(128)
        session.prefill(np.arange(20, dtype=np.int32))
        session.decode(3)
        session.close()
    del session
    device.synchronize()
    assert device.allocator.allocated_bytes <= before + (64 << 20)


def test_a_closed_model_gives_its_weights_back(converted: Converted) -> None:
    text_model = oazoo.load(converted("llama"))
    text_model.close()
    assert all(not parameter.shards for _, parameter in text_model.model.named_parameters())
    with pytest.raises(DeviceError, match="the table has no tensors"):
        text_model.logits([1, 2])


def test_broken_model_files(converted: Converted, tmp_path: Path) -> None:
    good = converted("llama")
    damaged = tmp_path / "damaged.oam"
    content = bytearray(good.read_bytes())
    with OamSource(good) as source:
        raw = source["layers.1.mlp.down.weight"].raw().tobytes()
        metadata = dict(source.metadata)
        infos = {name: tensor.info for name, tensor in source.items()}
    content[content.find(raw) + 77] ^= 4
    damaged.write_bytes(content)
    with pytest.raises(FormatError, match="section Weights is damaged"):
        oazoo.load(damaged)

    def write(name: str, payload: bytes, skip: str = "", reshape: str = "") -> Path:
        path = tmp_path / name
        entries = [
            OamEntry(n, i.shape if n != reshape else i.shape[::-1], i.encoding)
            for n, i in infos.items()
            if n != skip
        ]
        with (
            OamSource(good) as source,
            OamWriter(path, config=OamConfig("decoder", payload=payload), entries=entries) as out,
        ):
            for entry in entries:
                out.write(entry.name, source[entry.name].raw())
        return path

    import json

    def payload(**changes: object) -> bytes:
        return json.dumps({**metadata, **changes}).encode()

    with pytest.raises(FormatError, match=r"layers\.0\.attn\.k\.weight of the decoder model is missing"):
        oazoo.load(write("missing.oam", payload(), skip="layers.0.attn.k.weight"))
    with pytest.raises(FormatError, match=r"embed\.weight has shape \[64, 160\]"):
        oazoo.load(write("shape.oam", payload(), reshape="embed.weight"))
    with pytest.raises(FormatError, match="no model here can run"):
        oazoo.load(write("foreign.oam", b""))
    with pytest.raises(TranslationError, match="unknown model family 'octopus'"):
        oazoo.load(write("family.oam", payload(family="octopus")))
    model = {**metadata["model"], "num_layers": 10**9}
    with pytest.raises(TranslationError, match="num_layers"):
        oazoo.load(write("huge.oam", payload(model=model)))
    with pytest.raises(UsageError, match="no-such-model"):
        oazoo.load("no-such-model")


def test_other_containers_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from model_goldens import source_path

    monkeypatch.setenv("OAZOO_HOME", str(tmp_path / "home"))
    told: list[str] = []
    first = oazoo.load(source_path("llama"), notify=told.append)
    second = oazoo.load(source_path("llama"), notify=told.append)
    assert first.info["path"] == second.info["path"]
    assert len(told) == 1 and "once" in told[0]
    ids, wanted = reference("llama")
    assert np.abs(second.logits(ids) - wanted).max() < 1e-3


def test_memory_that_does_not_fit_is_told_before(converted: Converted) -> None:
    """VK-03: a model and a context that miss by a little, with what would fit."""
    import os
    import subprocess
    import sys

    path = converted("llama")
    code = (
        "import sys, oazoo\n"
        "from oazoo.errors import OazooError\n"
        "try:\n"
        "    oazoo.load(sys.argv[1]).model.new_session(128)\n"
        "    print('fits')\n"
        "except OazooError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    with OamSource(path) as source:
        weights = sum(tensor.info.nbytes for tensor in source.values())

    def outcome(limit: int) -> str:
        environment = {**os.environ, "OAZOO_MEMORY_LIMIT": str(limit)}
        command = [sys.executable, "-c", code, str(path)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert f"the weights take {weights:,} bytes" in outcome(int(weights * 0.9))
    # Memory is taken in blocks of 32 MiB: one holds these weights, and what is left must not hold the cache.
    said = outcome((32 << 20) + 60_000)
    assert "the cache of 128 tokens takes 65,536 bytes" in said and "117 tokens would fit" in said
    assert outcome(80 << 20) == "fits\n"


def test_the_layer_where_numbers_go_bad_is_named(converted: Converted, tmp_path: Path) -> None:
    """VK-07: one infinite weight in the second layer."""
    from click.testing import CliRunner

    from oazoo.cli.main import main

    good, bad = converted("F32"), tmp_path / "bad.oam"
    with OamSource(good) as source:
        entries = [OamEntry(name, t.info.shape, t.info.encoding) for name, t in source.items()]
        assets = {n.removeprefix("asset/"): t.raw().tobytes() for n, t in source.state.items()}
        with OamWriter(bad, config=source.config, entries=entries, assets=assets) as out:
            for name, tensor in source.items():
                values = tensor.numpy().copy()
                if name == "layers.0.mlp.down.weight":
                    values[0, 0] = np.inf
                out.write(name, values)
    assert oazoo.load(good).model.first_nonfinite([1, 2, 3]) is None
    runner = CliRunner()
    plain = runner.invoke(main, ["generate", str(bad), "-p", "the", "--raw"])
    assert plain.exit_code == 1 and "not finite" in plain.stderr and "--debug-nan" in plain.stderr
    traced = runner.invoke(main, ["generate", str(bad), "-p", "the", "--raw", "--debug-nan"])
    assert traced.exit_code == 1 and "It begins in layers.0:" in traced.stderr
