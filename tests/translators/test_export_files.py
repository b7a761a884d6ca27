"""Where an export is written, what is refused, and that nothing half done is ever left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import llama_folder
from exported import oam_bytes
from model_goldens import source_path

from oazoo.errors import FormatError, OazooError, OutputError, TranslationError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.source import TensorInfo
from oazoo.formats.streamed import StreamedTensor
from oazoo.translators import convert
from oazoo.translators.export import container_for, export

DATA = Path(__file__).resolve().parent.parent / "data"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    convert(llama_folder(tmp_path / "in"), tmp_path / "m.oam")
    return tmp_path / "m.oam"


def clean(folder: Path) -> bool:
    return not list(folder.glob(".oazoo-*"))


@pytest.mark.parametrize(
    ("output", "to", "expected"),
    [
        ("x.gguf", None, "gguf"),
        ("x.ONNX", None, "onnx"),
        ("x.bin", "onnx", "onnx"),
        ("X.GGUF", None, "gguf"),
        ("x.safetensors", None, "safetensors"),
        ("folder", None, "safetensors"),
        ("v1.5/", None, "safetensors"),
        ("x.bin", "gguf", "gguf"),
        ("v1.5", "safetensors", "safetensors"),
    ],
)
def test_the_name_says_the_container(output: str, to: str | None, expected: str) -> None:
    assert container_for(output, to) == expected


@pytest.mark.parametrize(
    ("output", "to", "message"),
    [
        ("x.bin", None, "what to export to"),
        ("x.gguf", "safetensors", "the name means gguf"),
        ("x.safetensors", "gguf", "the name means safetensors"),
        ("x.onnx", "gguf", "the name means onnx"),
        ("x", "tflite", "cannot export to 'tflite'; supported: safetensors, gguf, onnx"),
    ],
)
def test_names_that_say_nothing(output: str, to: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        container_for(output, to)


def test_a_single_file_has_its_settings_beside_it(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out ü"
    out.mkdir()
    report = export(model, out / "model.safetensors")
    names = {"model.safetensors", "config.json", "generation_config.json", "README.md"}
    assert {path.name for path in out.iterdir()} == names == set(report.files)
    (out / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"config.json: exists already"):
        export(model, out / "model.safetensors")
    assert not (out / "model.safetensors").exists() and clean(out)
    export(model, out / "model.safetensors", overwrite=True)
    convert(out, tmp_path / "again.oam")
    assert oam_bytes(tmp_path / "again.oam") == oam_bytes(model)
    assert any("looks for model.safetensors" in n for n in export(model, tmp_path / "x.safetensors").notes)


def test_folders(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(model, out, max_shard_bytes=20_000)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    with pytest.raises(UsageError, match="not empty"):
        export(model, out)
    export(model, out, overwrite=True)  # nothing of the former shards stays
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"not part of an export, so it is not replaced.*thesis"):
        export(model, out, overwrite=True)
    assert (out / "thesis.tex").exists() and clean(tmp_path)
    (tmp_path / "empty").mkdir()
    export(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_weights_of_a_graph_lie_in_it_or_beside_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oazoo.translators import export as module

    report = export(model, tmp_path / "a.onnx")
    assert set(report.files) == {"a.onnx", "generation_config.json"}
    report = export(model, tmp_path / "b.onnx", external=True, overwrite=True)
    assert set(report.files) == {"b.onnx", "b.onnx.data", "generation_config.json"}
    monkeypatch.setattr(module, "MAX_INLINE_BYTES", 10_000)  # instead of a model of gigabytes
    report = export(model, tmp_path / "c.onnx", overwrite=True)
    assert set(report.files) == {"c.onnx", "c.onnx.data", "generation_config.json"}
    for name in "abc":
        convert(tmp_path / f"{name}.onnx", tmp_path / f"{name}.oam")
        assert oam_bytes(tmp_path / f"{name}.oam") == oam_bytes(model)
    with pytest.raises(UsageError, match=r"c.onnx.data: exists already"):
        (tmp_path / "c.onnx").unlink()
        (tmp_path / "generation_config.json").unlink()
        export(model, tmp_path / "c.onnx")
    assert not (tmp_path / "c.onnx").exists() and clean(tmp_path)
    with pytest.raises(UsageError, match="only an ONNX graph"):
        export(model, tmp_path / "x.gguf", external=True)
    with pytest.raises(UsageError, match="another file of this export has that name"):
        export(model, tmp_path / "generation_config.json", to="onnx")
    model.rename(tmp_path / "d.onnx.data")
    with pytest.raises(UsageError, match="is the source itself"):
        export(tmp_path / "d.onnx.data", tmp_path / "d.onnx", external=True, overwrite=True)


def test_outputs_that_cannot_be(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for output, message in (
        (tmp_path / "none" / "out.gguf", "no such folder"),
        (tmp_path / "none" / "out", "no such folder"),
        (tmp_path / "file" / "out.gguf", "is a file, not a folder"),
        (tmp_path / "file", "is a file, not a folder"),
    ):
        with pytest.raises(OutputError, match=message):
            export(model, output)
    (tmp_path / "there.gguf").write_bytes(b"old")
    with pytest.raises(UsageError, match="exists already"):
        export(model, tmp_path / "there.gguf")
    assert (tmp_path / "there.gguf").read_bytes() == b"old"
    export(model, tmp_path / "there.gguf", overwrite=True)
    assert clean(tmp_path)


def test_a_damaged_model_does_not_travel_on(model: Path, tmp_path: Path) -> None:
    with OamSource(model) as source:
        needle = source["norm.weight"].raw().tobytes()
    data = bytearray(model.read_bytes())
    data[data.index(needle)] ^= 1
    model.write_bytes(data)
    for output in ("out", "out.gguf", "out.safetensors", "out.onnx"):
        with pytest.raises(FormatError, match="section Weights is damaged"):
            export(model, tmp_path / output)
        assert not (tmp_path / output).exists() and clean(tmp_path)


def test_values_outside_the_range_of_the_dtype(tmp_path: Path) -> None:
    from checkpoints import LLAMA, llama_tensors, write_hf

    tensors = llama_tensors(LLAMA)
    tensors["lm_head.weight"][0, 0] = 1e6
    convert(write_hf(tmp_path / "in", LLAMA, tensors), tmp_path / "m.oam")
    for output in ("out", "out.gguf", "out.onnx"):
        with pytest.raises(TranslationError, match=r"head.weight: the value 1e\+06 does not fit f16"):
            export(tmp_path / "m.oam", tmp_path / output, dtype="f16")
        assert not (tmp_path / output).exists() and clean(tmp_path)


def test_only_our_models_are_exported(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is gguf, not .oam; convert it first"):
        export(source_path("F32"), tmp_path / "out")
    with pytest.raises(TranslationError, match="was not converted by oazoo"):
        export(DATA / "oa" / "oam_linear_adamw.oam", tmp_path / "out")
    model.rename(tmp_path / "model.bin")
    with pytest.raises(UsageError, match="is the source itself"):
        export(tmp_path / "model.bin", tmp_path / "model.bin", to="gguf", overwrite=True)
    model = tmp_path / "model.bin"
    with pytest.raises(UsageError, match="unknown dtype"):
        export(model, tmp_path / "out", dtype="q4")
    with pytest.raises(UsageError, match="no such file"):
        export(tmp_path / "none.oam", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("family", "holds no model that can be exported: unknown model family 'other'"),
        ("missing", "the parameter norm.weight is missing"),
        ("shape", r"norm.weight has the shape \[2\]"),
        ("extra", "the model has no parameter 'more'"),
        ("integer", "norm.weight is stored as i32, which is no weight"),
    ],
)
def test_models_that_are_not_what_they_say(change: str, message: str, model: Path, tmp_path: Path) -> None:
    tensors: dict[str, npt.NDArray[Any]] = {}
    with OamSource(model) as source:
        payload = source.config.payload
        for name, tensor in source.items():
            tensors[name] = np.array(tensor.numpy())
    if change == "family":
        payload = json.dumps(json.loads(payload) | {"family": "other"}).encode()
    elif change == "missing":
        del tensors["norm.weight"]
    elif change == "extra":
        tensors["more"] = np.zeros(2, np.float32)
    else:
        tensors["norm.weight"] = np.zeros(2, "f4") if change == "shape" else np.zeros(32, "i4")
    kinds = {np.dtype("f4"): "f32", np.dtype("i4"): "i32"}
    entries = [OamEntry(name, value.shape, kinds[value.dtype]) for name, value in tensors.items()]
    with OamWriter(
        tmp_path / "bad.oam", config=OamConfig("decoder", payload=payload), entries=entries
    ) as writer:
        for name, value in tensors.items():
            writer.write(name, value)
    with pytest.raises(TranslationError, match=message):
        export(tmp_path / "bad.oam", tmp_path / "out")


def test_what_was_written_is_read_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that returns other bytes than it was given is noticed before the file gets its name."""
    from oazoo.translators import export as module

    write = module.write_gguf

    def write_badly(path: Path, metadata: Any, tensors: Any) -> None:
        write(path, metadata, tensors)
        with path.open("r+b") as file:
            file.seek(-100, 2)
            file.write(b"\1")

    monkeypatch.setattr(module, "write_gguf", write_badly)
    with pytest.raises(OutputError, match=r"/out.gguf: \S+ was not written as it was meant"):
        export(model, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists() and clean(tmp_path)


def test_pieces_must_add_up(tmp_path: Path) -> None:
    from oazoo.formats.gguf_writer import write_gguf

    def pieces() -> Iterator[npt.NDArray[Any]]:
        yield np.zeros(3, np.float32)

    short = StreamedTensor(TensorInfo("w", (4,), "f32", 16), pieces)
    with pytest.raises(FormatError, match="'w': 12 bytes came, 16 were announced"):
        write_gguf(tmp_path / "x.gguf", {"general.architecture": "x"}, [short])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("output", ("out", "out.gguf", "out.onnx"))
def test_a_file_size_limit(output: str, model: Path, tmp_path: Path) -> None:
    """The disk is full in the middle: a clear error, and nothing stays."""
    program = (
        "import resource, signal, sys\n"
        "from oazoo.translators.export import export\n"
        "from oazoo.errors import OutputError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try:\n"
        "    export(sys.argv[1], sys.argv[2])\n"
        "except OutputError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, model, tmp_path / output], capture_output=True, text=True
    )
    assert "larger than the file system or the process limit" in done.stdout, done.stdout + done.stderr
    assert str(tmp_path / "out") in done.stdout and "partial" not in done.stdout
    assert not (tmp_path / output).exists() and clean(tmp_path)


@pytest.mark.parametrize(("output", "megabytes"), (("out", 96), ("out.gguf", 96), ("out.onnx", 96 + 130)))
def test_memory_is_bounded(output: str, megabytes: int, tmp_path: Path) -> None:
    """A model of 240 MB leaves, with rows reordered, in 96 MB of address space above what the interpreter takes.

    A message of protobuf is mapped whole when it is read again: 130 MB of addresses, not of memory.
    """
    from oazoo.configs import DecoderConfig

    config = DecoderConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_layers=4, num_heads=16, num_kv_heads=4,
        head_dim=64, norm_eps=1e-5, rope_theta=1e4, max_positions=64, tied_embeddings=True,
    )  # fmt: skip
    payload = b'{"oazoo":1,"family":"decoder","model":%s}' % json.dumps(config.to_json()).encode()
    entries = [OamEntry(name, shape, "f32") for name, shape in config.parameters().items()]
    with OamWriter(
        tmp_path / "m.oam", config=OamConfig("decoder", payload=payload), entries=entries
    ) as writer:
        for entry in entries:
            writer.write(entry.name, np.zeros(entry.shape, np.float32))
    assert (tmp_path / "m.oam").stat().st_size > 240 << 20
    program = (
        "import resource, sys\n"
        "from oazoo.translators.export import export\n"
        "import onnx, oazoo.translators.translator as t; t.translators()\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (int(sys.argv[3]) << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "export(sys.argv[1], sys.argv[2], dtype='f16')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "m.oam", tmp_path / output, str(megabytes)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_errors_are_ours(model: Path, tmp_path: Path) -> None:
    """Whatever the metadata of a model says, the answer is one of our errors or a good file."""
    with OamSource(model) as source:
        document = json.loads(source.config.payload)
        tensors = {name: np.array(tensor.numpy()) for name, tensor in source.items()}
    entries = [OamEntry(name, value.shape, "f32") for name, value in tensors.items()]
    odd: list[Any] = [
        None,
        7,
        "x",
        [],
        {},
        [[]],
        -1,
        1e400,
        {"eos_ids": "x"},
        {"eos_ids": [-1]},
        {"bos_id": "x"},
    ]
    for key in ("family", "model", "generation", "tokenizer", "source", "quantization", "tool"):
        for value in odd:
            payload = json.dumps(document | {key: value}).replace("Infinity", "1e400").encode()
            with OamWriter(
                tmp_path / "odd.oam",
                config=OamConfig("decoder", payload=payload),
                entries=entries,
                overwrite=True,
            ) as writer:
                for name, array in tensors.items():
                    writer.write(name, array)
            for output in ("odd", "odd.gguf", "odd.onnx"):
                try:
                    export(tmp_path / "odd.oam", tmp_path / output, overwrite=True)
                except OazooError as error:
                    assert str(error)
