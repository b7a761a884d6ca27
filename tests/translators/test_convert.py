"""Conversions as a whole: refusals that leave nothing behind, hostile settings, bounded memory, reports."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import (
    LLAMA,
    bpe_metadata,
    gguf_names,
    llama_folder,
    llama_metadata,
    llama_shapes,
    llama_tensors,
    write_gguf,
    write_hf,
)

from oazoo.errors import FormatError, OazooError, OutputError, TranslationError, UsageError
from oazoo.formats.detect import open_source
from oazoo.formats.oam import OamSource
from oazoo.translators import convert, plan, supported, translators


def refused(source: Path, out: Path, named: str, **options: Any) -> None:
    """The conversion is refused with a message of ours, and the folder of the output stays as it was."""
    before = {path.name: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}
    with pytest.raises(OazooError, match=named):
        convert(source, out, **options)
    after = {path.name: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}
    assert before == after


# ------------------------------------------------------------------------------------------------
# architectures


@pytest.mark.parametrize(
    "names",
    [["NoSuchForCausalLM"], [], ["LlamaModel"], ["x" * 10000], ["\x1b[31mred"], ["hf:LlamaForCausalLM"]],
)
def test_unknown_architecture_lists_what_is_supported(tmp_path: Path, names: list[str]) -> None:
    folder = llama_folder(tmp_path / "hf", {"architectures": names})
    refused(folder, tmp_path / "m.oam", "unsupported architecture")
    with pytest.raises(TranslationError) as caught:
        plan(folder)
    for line in supported():
        assert line in str(caught.value)
    assert len(str(caught.value)) < 2000 and "\x1b" not in str(caught.value)


def test_unknown_gguf_architecture(tmp_path: Path) -> None:
    metadata = {"general.architecture": "gemma9"}
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_names(llama_tensors(LLAMA)))
    refused(path, tmp_path / "m.oam", "gemma9")


def test_architecture_by_name(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf", {"architectures": ["YiForCausalLM"]})
    refused(folder, tmp_path / "m.oam", "YiForCausalLM")
    report = convert(folder, tmp_path / "m.oam", arch="llama")
    assert report.translator == "llama"
    refused(folder, tmp_path / "n.oam", "no-such", arch="no-such")
    refused(folder, tmp_path / "n.oam", "vocab_size|n_embd", arch="gpt2")


def test_every_translator_accepts_what_no_other_does() -> None:
    accepted = [name for entry in translators().values() for name in entry.accepts]
    assert len(accepted) == len(set(accepted))
    assert all(re.fullmatch(r"(gguf|hf|torch|onnx|raw):\w+", name) for name in accepted)


# ---------------------------------------------------------------------------------------------- hostile
# settings

HOSTILE: list[tuple[Any, str]] = [
    ("", "JSON"),
    ("{", "JSON"),
    ("[]", "object"),
    ("null", "object"),
    ('"LlamaForCausalLM"', "object"),
    ('{"a":' * 50000 + "1" + "}" * 50000, "JSON"),
    ("[" * 50000 + "]" * 50000, "JSON"),
    ('{"vocab_size": NaN}', "JSON"),
    ('{"vocab_size": ' + "9" * 5000 + "}", "JSON"),
    ('{"hidden_size": 32, "hidden_size": 64}', "twice"),
    (LLAMA | {"architectures": "LlamaForCausalLM"}, "architectures"),
    (LLAMA | {"architectures": [3]}, "architectures"),
    (LLAMA | {"architectures": None}, "architecture"),
    (LLAMA | {"vocab_size": 1 << 40}, "vocab_size"),
    (LLAMA | {"vocab_size": 1 << 80}, "vocab_size"),
    (LLAMA | {"vocab_size": "40"}, "vocab_size"),
    (LLAMA | {"vocab_size": True}, "vocab_size"),
    (LLAMA | {"vocab_size": 40.0}, "vocab_size"),
    (LLAMA | {"vocab_size": [40]}, "vocab_size"),
    (LLAMA | {"hidden_size": -32}, "hidden_size"),
    (LLAMA | {"hidden_size": 0}, "hidden_size|head_dim"),
    (LLAMA | {"num_hidden_layers": 10**9}, "num_layers"),
    (LLAMA | {"num_hidden_layers": -1}, "num_layers"),
    (LLAMA | {"num_hidden_layers": 4000}, "lacks"),
    (LLAMA | {"num_attention_heads": 0}, "num_attention_heads"),
    (LLAMA | {"num_attention_heads": -4}, "num_attention_heads"),
    (LLAMA | {"num_key_value_heads": 3}, "num_kv_heads"),
    (LLAMA | {"num_key_value_heads": 0}, "num_kv_heads"),
    (LLAMA | {"head_dim": 7}, "head_dim"),
    (LLAMA | {"head_dim": 1 << 30}, "head_dim"),
    (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    (LLAMA | {"rms_norm_eps": -1}, "norm_eps"),
    (LLAMA | {"rope_theta": 0}, "rope_theta"),
    (LLAMA | {"rope_theta": 10**400}, "rope_theta"),
    (LLAMA | {"max_position_embeddings": 1 << 50}, "max_positions"),
    (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    (LLAMA | {"hidden_act": ["silu"]}, "hidden_act"),
    (LLAMA | {"layer_types": 7}, "layer_types"),
    (LLAMA | {"layer_types": [{}, {}]}, "layer type"),
]


@pytest.mark.parametrize(("config", "named"), HOSTILE, ids=[str(n) for n in range(len(HOSTILE))])
def test_hostile_configs(tmp_path: Path, config: Any, named: str) -> None:
    refused(write_hf(tmp_path / "hf", config, llama_tensors(LLAMA)), tmp_path / "m.oam", named)


def test_no_config(tmp_path: Path) -> None:
    refused(write_hf(tmp_path / "hf", None, llama_tensors(LLAMA)), tmp_path / "m.oam", r"config\.json")


def test_hostile_gguf_settings(tmp_path: Path) -> None:
    """Every hyper-parameter in turn: gone, of another type, negative, huge."""
    tensors = gguf_names(llama_tensors(LLAMA))
    for key in llama_metadata():
        if key == "general.architecture":
            continue
        for value in (None, "text", True, [1, 2], 0.5, 4294967295, 0):
            metadata = {k: v for k, v in (llama_metadata() | {key: value}).items() if v is not None}
            path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
            try:
                with plan(path) as found:
                    found.config.to_json()
            except OazooError:
                continue
            # What is optional may be absent, and a range may hold the value.
            assert value is None or key.endswith(("context_length", "epsilon", "freq_base")), (key, value)


# ------------------------------------------------------------------------------------------------ damaged
# sources


def test_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    removed = dict(tensors)
    del removed["model.layers.1.mlp.up_proj.weight"]
    refused(write_hf(tmp_path / "a", LLAMA, removed), tmp_path / "m.oam", r"layers\.1\.mlp\.up_proj")
    extra = tensors | {"model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float32)}
    refused(write_hf(tmp_path / "b", LLAMA, extra), tmp_path / "m.oam", r"layers\.2\.mlp\.up_proj")


def test_saved_inverse_frequencies_are_ignored_with_a_reason(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    report = convert(write_hf(tmp_path / "hf", LLAMA, tensors), tmp_path / "m.oam")
    assert len(report.ignored) == 2 and all("config" in reason for _, reason in report.ignored)
    assert any("inv_freq" in line for line in report.summary())


def test_two_tensors_of_one_name_in_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), gguf_names(llama_tensors(LLAMA)))
    data = path.read_bytes()
    # Give the second layer's tensors the names of the first.
    path.write_bytes(data.replace(b"blk.1.", b"blk.0."))
    refused(path, tmp_path / "m.oam", r"blk\.0\.")


@pytest.mark.parametrize(
    ("names", "scheme"),
    [
        (["qweight", "qzeros", "scales", "g_idx"], "GPTQ"),
        (["weight", "SCB"], "bitsandbytes"),
        (["weight", "scales", "biases"], "MLX"),
        (["weight", "weight_scale"], "FP8"),
        (["weight_packed", "weight_scale", "weight_shape"], "compressed-tensors|FP8"),
        (["weight", "weight_scale_2"], "NVFP4"),
        (["weight", "weight_scales"], "EETQ"),
        (["W_q", "scale", "zero"], "HQQ"),
        (["Qidxs", "SU", "SV"], "QuIP#"),
        (["codes", "codebooks"], "AQLM"),
        (["weight._data", "weight._scale"], "Quanto"),
        (["weight_blocks", "weight_scales"], "MXFP4|EETQ"),
        (["up_proj_blocks", "up_proj_scales"], "MXFP4"),
        (["weight", "weight_scale_inv"], "has a scale, but is i32"),
    ],
)
def test_packed_checkpoints_are_recognised_at_once(tmp_path: Path, names: list[str], scheme: str) -> None:
    tensors = llama_tensors(LLAMA)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    for name in names:
        tensors[f"model.layers.0.mlp.up_proj.{name}"] = np.zeros((4, 4), np.int32)
    refused(write_hf(tmp_path / "hf", LLAMA, tensors), tmp_path / "m.oam", scheme)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", None])
def test_declared_packing(tmp_path: Path, method: str | None) -> None:
    settings = {"bits": 4} | ({"quant_method": method} if method else {})
    folder = llama_folder(tmp_path / "hf", {"quantization_config": settings})
    refused(folder, tmp_path / "m.oam", f"packed by {method}" if method else "packed")


def test_a_value_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    tensors["lm_head.weight"][39, 31] = 70000.0
    folder = write_hf(tmp_path / "hf", LLAMA, tensors)
    refused(folder, tmp_path / "m.oam", r"lm_head\.weight.*70000", dtype="f16")
    report = convert(folder, tmp_path / "m.oam", dtype="bf16")
    assert report.rounded


def test_nan_is_reported(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    tensors["lm_head.weight"][0, :3] = [np.nan, np.inf, -np.inf]
    report = convert(write_hf(tmp_path / "hf", LLAMA, tensors), tmp_path / "m.oam")
    assert [(t.target, t.nan, t.infinite) for t in report.nonfinite] == [("head.weight", 1, 2)]
    assert any("NaN" in line for line in report.summary())


def test_infinite_block_scales_are_reported(tmp_path: Path) -> None:
    tensors = gguf_names(llama_tensors(LLAMA | {"intermediate_size": 64}))
    metadata = llama_metadata() | {"llama.feed_forward_length": 64}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors, "Q8_0")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(t for t in reader.tensors if t.name == "output.weight")
    tensor.data.reshape(-1)[:2] = np.array([np.inf], "<f2").view(np.uint8)
    reader.data.flush()
    report = convert(path, tmp_path / "m.oam")
    # Every weight of the block, whose codes are not zero, is infinite.
    (found,) = report.nonfinite
    assert (found.target, found.infinite + found.nan) == ("head.weight", 32)


# -------------------------------------------------------------------------------------------------------
# output


def test_existing_output(tmp_path: Path) -> None:
    folder, out = llama_folder(tmp_path / "hf"), tmp_path / "m.oam"
    out.write_bytes(b"old")
    refused(folder, out, "exists")
    convert(folder, out, overwrite=True)
    assert out.read_bytes() != b"old"
    # A failure half way leaves the file that was there.
    tensors = llama_tensors(LLAMA)
    tensors["lm_head.weight"][39, 31] = 70000.0
    whole = out.read_bytes()
    refused(write_hf(tmp_path / "bad", LLAMA, tensors), out, "70000", dtype="f16", overwrite=True)
    assert out.read_bytes() == whole


def test_output_places(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    with pytest.raises(OutputError, match="no such folder"):
        convert(folder, tmp_path / "no" / "m.oam")
    with pytest.raises(OutputError, match="folder"):
        convert(folder, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_too_little_disk_is_noticed_before_writing(tmp_path: Path) -> None:
    """A checkpoint of holes, larger than the disk: 2^24 rows, counts beyond 32 bits, planned in an instant."""
    free = shutil.disk_usage(tmp_path).free
    hidden = 64
    while (hidden << 24) * 4 < 2 * free:
        hidden *= 2
    config = LLAMA | {"vocab_size": 1 << 24, "hidden_size": hidden, "tie_word_embeddings": True}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    header, position = {}, 0
    for name, shape in llama_shapes(config).items():
        size = math.prod(shape) * 4
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with (tmp_path / "hf" / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    with plan(tmp_path / "hf") as found:
        assert found.output_bytes > position > 2 * free
    refused(tmp_path / "hf", tmp_path / "m.oam", "bytes are needed")


def test_interruption_leaves_nothing(tmp_path: Path) -> None:
    def stop(label: str, done: int, total: int | None, unit: str = "bytes") -> None:
        if label == "convert" and total is not None and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(llama_folder(tmp_path / "hf"), tmp_path / "m.oam", progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int | None]]] = {}

    def note(label: str, done: int, total: int | None, unit: str = "bytes") -> None:
        seen.setdefault(label, []).append((done, total))

    convert(llama_folder(tmp_path / "hf"), tmp_path / "m.oam", progress=note)
    assert set(seen) == {"hash", "convert"}
    for steps in seen.values():
        done = [step for step, _ in steps]
        assert done == sorted(done) and steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("name", ["модель 模型 é 🙂", "e\u0301 b"])
def test_names_with_spaces_and_letters_of_all_kinds(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    folder = llama_folder(place)
    report = convert(folder, place / "a b.oam")
    assert report.source["name"] == name
    with open_source(place / "a b.oam") as source:
        assert source.metadata["source"]["name"] == name


def test_conversion_is_reproducible(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    convert(folder, tmp_path / "a.oam")
    convert(folder, tmp_path / "b.oam")
    assert (tmp_path / "a.oam").read_bytes() == (tmp_path / "b.oam").read_bytes()


def test_an_oam_is_not_converted_again(tmp_path: Path) -> None:
    convert(llama_folder(tmp_path / "hf"), tmp_path / "m.oam")
    refused(tmp_path / "m.oam", tmp_path / "n.oam", "oazoo quantize")


def test_provenance_is_checked(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    with pytest.raises(UsageError, match="colour"):
        convert(folder, tmp_path / "m.oam", provenance={"colour": "red"})
    assert not (tmp_path / "m.oam").exists()
    with pytest.raises(UsageError, match="SHA-256"):
        convert(folder, tmp_path / "m.oam", provenance={"files": {"model.safetensors": "guess"}})
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    report = convert(folder, tmp_path / "m.oam", provenance={"files": {"model.safetensors": digest}})
    assert report.source["sha256"] == digest
    with pytest.raises(FormatError, match=r"model\.safetensors: has changed since it was fetched"):
        convert(folder, tmp_path / "n.oam", provenance={"files": {"model.safetensors": "ab" * 32}})
    assert not (tmp_path / "n.oam").exists()


def test_sampling_defaults_fill_what_the_source_leaves_open(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    defaults = {"temperature": 0.2, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    with plan(folder, provenance={"generation": defaults}) as planned:
        predicted = planned.output_bytes
    convert(folder, tmp_path / "m.oam", provenance={"generation": defaults})
    assert (tmp_path / "m.oam").stat().st_size == predicted
    with OamSource(tmp_path / "m.oam") as made:
        assert made.metadata["generation"] == {"temperature": 0.6, "top_p": 0.9} | {
            key: made.metadata["generation"][key] for key in ("bos_id", "eos_ids")
        }


def test_an_opened_source_stays_open(tmp_path: Path) -> None:
    with open_source(llama_folder(tmp_path / "hf")) as source:
        convert(source, tmp_path / "m.oam")
        assert source["lm_head.weight"].numpy().shape == (40, 32)


def test_a_failed_plan_closes_what_it_opened(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf", {"hidden_act": "relu"})
    descriptors = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else None
    for _ in range(5):
        with pytest.raises(TranslationError):
            plan(folder)
    if descriptors is not None:
        assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


def test_report_is_plain_json(tmp_path: Path) -> None:
    from rich.console import Console

    report = convert(llama_folder(tmp_path / "hf"), tmp_path / "m.oam", dtype="f16")
    shown = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert shown["max_error"] == report.max_error > 0
    assert len(shown["tensors"]) == 21 and all(t["rounded"] for t in shown["tensors"])
    assert shown["output_bytes"] == (tmp_path / "m.oam").stat().st_size
    assert f"{len(report.rounded)} tensors were rounded" in "\n".join(report.summary())
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(report.table())
    line = next(line for line in console.export_text().splitlines() if "layers.*.attn.q.weight" in line)
    largest = max(t.max_error for t in report.rounded if t.target.endswith("attn.q.weight"))
    assert line.split() == ["layers.*.attn.q.weight", "f32", "f16", "2", f"{largest:.3g}"]


def test_names_from_files_are_not_markup(tmp_path: Path) -> None:
    """A tensor called [red]x must appear as that, and must not break the table."""
    from rich.console import Console

    tensors = gguf_names(llama_tensors(LLAMA))
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(40) | {"general.name": "[/bold]x"}, tensors)
    with plan(path) as found:
        Console(file=open("/dev/null", "w")).print(found.table())  # noqa: SIM115, PTH123
        assert found.source_record({})["name"] == "[/bold]x"


# -------------------------------------------------------------------------------------------------------
# memory

_MEASURE = """
import resource, sys
from oazoo.translators import convert
from oazoo.formats.detect import open_source
from oazoo.formats.oam import OamSource
import gguf.quants, tokenizers, ml_dtypes
def address_space():
    return int(next(l for l in open('/proc/self/status') if l.startswith('VmSize')).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (address_space() + int(sys.argv[3]),) * 2)
convert(sys.argv[1], sys.argv[2], dtype=sys.argv[4])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the address space is read from /proc")
@pytest.mark.parametrize("dtype", ["keep", "f16"])
def test_memory_is_bounded(tmp_path: Path, dtype: str) -> None:
    """A model of 170 MB in tensors of up to 8 MB converts within 120 MB of address space."""
    config = LLAMA | {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "vocab_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    folder = write_hf(tmp_path / "hf", config, llama_tensors(config))
    assert (folder / "model.safetensors").stat().st_size > 170e6
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder), str(tmp_path / "m.oam"), str(120 << 20), dtype],
        capture_output=True,
        text=True,
        # The writer's threads would each reserve 64 MB of addresses for an arena, and use next to nothing of it.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    # The suite keeps the folders of its last runs; these files are large.
    (folder / "model.safetensors").unlink()
    (tmp_path / "m.oam").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_large_vocabulary_plans(tmp_path: Path) -> None:
    """A tokenizer of many tokens does not make the plan refuse or lose an id."""
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"] += [f"<extra_{n}>" for n in range(20000)]
    metadata["tokenizer.ggml.token_type"] += [4] * 20000
    rows = len(metadata["tokenizer.ggml.tokens"])
    tensors = gguf_names(llama_tensors(LLAMA | {"vocab_size": rows}))
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(rows) | metadata, tensors)
    with plan(path) as found:
        assert found.assets.tokenizer is not None
        assert not any("rows" in note for note in found.notes)
