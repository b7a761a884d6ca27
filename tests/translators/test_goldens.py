"""The golden checkpoints: every tensor against values read with the formats' own packages, and the reference logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize
from model_goldens import GGUF, HF, NOT_ONNX
from reference_models import load_oam, logits
from safetensors import safe_open

from oazoo.configs import config_from_json
from oazoo.formats.detect import open_source
from oazoo.translators import convert, plan

DATA = Path(__file__).resolve().parent.parent / "data"
#: Those without stacks of experts, whose tensors `test_moe.py` compares.
DENSE = tuple(name for name in HF if name not in NOT_ONNX)
Array = npt.NDArray[Any]


def read_safetensors(folder: Path) -> dict[str, Array]:
    """All tensors of a folder, by the safetensors package (bfloat16 by ml_dtypes, from the raw bytes)."""
    tensors: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                if header[name]["dtype"] == "BF16":
                    start, stop = header[name]["data_offsets"]
                    raw = np.frombuffer(data[8 + size + start : 8 + size + stop], ml_dtypes.bfloat16)
                    tensors[name] = raw.reshape(header[name]["shape"])
                else:
                    tensors[name] = file.get_tensor(name)
    return tensors


def taken_apart(name: str, source: dict[str, Array]) -> dict[str, Array]:
    """A family's fused weights as those of Llama, row by row, from their published layout."""
    settings = json.loads((DATA / "hf" / name / "config.json").read_text())
    heads = settings["num_attention_heads"]
    dim, kv = settings["hidden_size"] // heads, settings.get("num_key_value_heads", heads)
    rows = {"q_proj": heads * dim, "k_proj": kv * dim, "v_proj": kv * dim}
    result: dict[str, Array] = {}
    for key, value in source.items():
        stem, _, suffix = key.rpartition(".")
        at, _, last = stem.rpartition(".")
        if last == "qkv_proj":
            start = 0
            for part, count in rows.items():
                result[f"{at}.{part}.{suffix}"] = value[start : start + count]
                start += count
        elif last == "gate_up_proj":
            half = len(value) // 2
            result[f"{at}.gate_proj.{suffix}"], result[f"{at}.up_proj.{suffix}"] = value[:half], value[half:]
        elif last == "query_key_value":
            for number, part in enumerate(rows):
                order = [(3 * head + number) * dim + row for head in range(heads) for row in range(dim)]
                result[f"{at}.{part}.{suffix}"] = value[order]
        else:
            result[key] = value
    return result


#: Names of other families than Llama.
WORDS: dict[str, dict[str, str]] = {
    "gpt_neox": {
        "gpt_neox.": "",
        "embed_in": "embed",
        "embed_out": "head",
        "final_layer_norm": "norm",
        "attention.dense": "attn.o",
        "attention.": "attn.",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.down",
    },
    "olmo2": {
        "post_attention_layernorm": "attn_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
}
WORDS["gemma"] = WORDS["olmo2"] | {"pre_feedforward_layernorm": "mlp_norm"}


def expected_hf(name: str) -> dict[str, Array]:
    """The model's parameters as our names should hold them, from the published meaning of the source's names."""
    source = read_safetensors(DATA / "hf" / name)
    if name.startswith(("phi3", "gpt_neox")):
        source = taken_apart(name, source)
    result: dict[str, Array] = {}
    for key, value in source.items():
        if name == "gpt2":
            key = key.removeprefix("transformer.")
            words = {
                "wte": "embed",
                "wpe": "positions",
                "ln_f": "norm",
                "h.": "layers.",
                "ln_1": "attn_norm",
                "ln_2": "mlp_norm",
                "attn.c_attn": "attn.qkv",
                "attn.c_proj": "attn.o",
                "mlp.c_fc": "mlp.up",
                "mlp.c_proj": "mlp.down",
            }
            if ".c_" in key and key.endswith(".weight"):
                value = value.T
        else:
            key = key.removeprefix("model.")
            family = next((words for start, words in WORDS.items() if name.startswith(start)), {})
            words = {
                "embed_tokens": "embed",
                "lm_head": "head",
                "input_layernorm": "attn_norm",
                "post_attention_layernorm": "mlp_norm",
                "self_attn.": "attn.",
                "_proj": "",
            }
            words = family | {old: new for old, new in words.items() if old not in family}
        for old, new in words.items():
            key = key.replace(old, new)
        result[key] = value
    return result


def expected_gguf(kind: str) -> dict[str, Array]:
    """The same from GGUF, read and dequantised by the gguf package; q and k rows put back in order one by one."""
    reader = gguf.GGUFReader(DATA / "gguf" / f"tiny-{kind}.gguf")
    words = {
        "token_embd": "embed",
        "output_norm": "norm",
        "attn_output": "attn.o",
        "output": "head",
        "blk": "layers",
        "ffn_norm": "mlp_norm",
        "ffn_": "mlp.",
        "attn_norm": "attn_norm",
        "attn_q": "attn.q",
        "attn_k": "attn.k",
        "attn_v": "attn.v",
    }
    result: dict[str, Array] = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        value = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        key = str(tensor.name)
        for old, new in words.items():
            key = key.replace(old, new)
        heads = {"layers.0.attn.q.weight": 4, "layers.0.attn.k.weight": 2}.get(key)
        if heads:
            dim = shape[0] // heads
            order = [
                head * dim + 2 * (row % (dim // 2)) + row // (dim // 2)
                for head in range(heads)
                for row in range(dim)
            ]
            value = value[order]
        result[key] = value
    return result


@pytest.mark.parametrize("name", DENSE)
def test_hf_tensors_are_kept_bit_for_bit(name: str, tmp_path: Path) -> None:
    report = convert(DATA / "hf" / name, tmp_path / "m.oam")
    assert not report.rounded and not report.ignored
    expected = expected_hf(name)
    with open_source(tmp_path / "m.oam") as source:
        source.verify()  # type: ignore[attr-defined]
        assert set(source) == set(expected)
        for key, value in expected.items():
            found = source[key].numpy()
            assert found.dtype == value.dtype, key
            assert found.tobytes() == np.ascontiguousarray(value).tobytes(), key


@pytest.mark.parametrize("kind", GGUF)
def test_gguf_tensors(kind: str, tmp_path: Path) -> None:
    report = convert(DATA / "gguf" / f"tiny-{kind}.gguf", tmp_path / "m.oam")
    lossless = kind in ("F32", "BF16", "Q4_0", "Q8_0")
    expected = expected_gguf(kind)
    encoding = {"F32": "f32", "BF16": "bf16", "Q4_0": "q4", "Q8_0": "q8"}.get(kind, "f16")
    errors = {tensor.target: tensor.max_error for tensor in report.tensors}
    with open_source(tmp_path / "m.oam") as source:
        source.verify()  # type: ignore[attr-defined]
        assert set(source) == set(expected)
        for key, value in expected.items():
            dense = value.ndim == 1
            assert source[key].info.encoding == ("f32" if dense else encoding), key
            found = source[key].numpy().astype(np.float32)
            if lossless or dense:
                assert np.array_equal(found, value), key
                assert errors[key] == 0
            else:
                assert np.array_equal(found, value.astype(np.float16).astype(np.float32)), key
                # The report's number is the largest change there is.
                assert errors[key] == np.abs(found - value).max() > 0, key
    assert bool(report.rounded) != lossless


def _logit_cases() -> list[tuple[Path, str, str, float]]:
    cases = [(DATA / "hf" / name, "logits", name, 2e-2 if name == "llama_tied_bf16" else 5e-5) for name in HF]
    for kind in GGUF:
        tolerance = 1e-3 if kind in ("F32", "Q4_0", "Q8_0") else 2e-2
        cases.append((DATA / "gguf" / f"tiny-{kind}.gguf", kind, kind, tolerance))
    return cases


@pytest.mark.parametrize(("path", "key", "name", "tolerance"), _logit_cases(), ids=lambda v: str(v))
def test_reference_logits(path: Path, key: str, name: str, tolerance: float, tmp_path: Path) -> None:
    convert(path, tmp_path / "m.oam")
    params, config = load_oam(tmp_path / "m.oam")
    reference = np.load((path if path.is_dir() else path.parent) / "reference.npz")
    ids, expected = np.atleast_2d(reference["ids"]), reference[key]
    expected = expected.reshape(*ids.shape, -1)
    for sequence, wanted in zip(ids, expected, strict=True):
        found = logits(params, config, sequence)
        assert np.abs(found - wanted).max() < tolerance


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    ("dtype", "cast"),
    [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)],
)
def test_dtype(name: str, dtype: str, cast: Callable[..., Any], tmp_path: Path) -> None:
    report = convert(DATA / "hf" / name, tmp_path / "m.oam", dtype=dtype)
    expected = expected_hf(name)
    with open_source(tmp_path / "m.oam") as source:
        for key, value in expected.items():
            assert source[key].info.encoding == dtype
            assert source[key].numpy().tobytes() == np.ascontiguousarray(value.astype(cast)).tobytes(), key
    changed = {
        key
        for key, value in expected.items()
        if not np.array_equal(value.astype(cast).astype(np.float64), value.astype(np.float64))
    }
    assert {tensor.target for tensor in report.rounded} == changed


@pytest.mark.parametrize("kind", GGUF)
def test_quantised_sources_can_be_made_dense(kind: str, tmp_path: Path) -> None:
    convert(DATA / "gguf" / f"tiny-{kind}.gguf", tmp_path / "m.oam", dtype="f32")
    with open_source(tmp_path / "m.oam") as source:
        for key, value in expected_gguf(kind).items():
            assert source[key].info.encoding == "f32"
            assert np.array_equal(source[key].numpy(), value), key


@pytest.mark.parametrize("path", [DATA / "hf" / "qwen2", DATA / "gguf" / "tiny-Q8_0.gguf"], ids=str)
def test_plan_predicts_the_file(path: Path, tmp_path: Path) -> None:
    with plan(path) as planned:
        predicted = planned.output_bytes
        shown = json.loads(json.dumps(planned.to_json()))
        targets = list(planned.config.parameters())
    report = convert(path, tmp_path / "m.oam")
    assert predicted == report.output_bytes == (tmp_path / "m.oam").stat().st_size
    assert [tensor["target"] for tensor in shown["tensors"]] == targets
    assert [tensor["encoding"] for tensor in shown["tensors"]] == [t.encoding for t in report.tensors]
    assert shown["peak_bytes"] > 0


def test_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with plan(DATA / "gguf" / "tiny-Q4_0.gguf") as planned:
        Console(width=160).print(planned.table())
    shown = capsys.readouterr().out
    assert "layers.*.attn.q.weight" in shown and "blk.*.attn_q.weight" in shown
    assert "RopePermute(4 heads" in shown and "RopePermute(2 heads" in shown


def test_what_travels_inside(tmp_path: Path) -> None:
    import hashlib

    path = DATA / "gguf" / "tiny-Q4_0.gguf"
    convert(
        path,
        tmp_path / "m.oam",
        provenance={"name": "tiny", "revision": "r1", "license": "Apache-2.0", "uri": "pypi:tiny==1"},
    )
    with open_source(tmp_path / "m.oam") as source:
        document = dict(source.metadata)
        assets = [name for name in source.state if name.startswith("asset/")]  # type: ignore[attr-defined]
    assert document["oazoo"] == 1 and document["family"] == "decoder"
    config = config_from_json(document["family"], document["model"])
    assert config.to_json()["num_kv_heads"] == 2
    record = document["source"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert record["name"] == "tiny" and record["revision"] == "r1" and record["license"] == "Apache-2.0"
    assert record["format"] == "gguf" and record["sha256"] == digest
    assert record["files"] == [{"name": path.name, "bytes": path.stat().st_size, "sha256": digest}]
    assert document["generation"] == {"bos_id": 266, "eos_ids": [268]}
    assert document["tool"].startswith("oazoo ")
    assert assets == ["asset/tokenizer.json"]
    assert str(tmp_path) not in json.dumps(document) and str(DATA) not in json.dumps(document)


def test_shards_are_hashed_one_by_one(tmp_path: Path) -> None:
    import hashlib

    folder = DATA / "hf" / "qwen2"
    report = convert(folder, tmp_path / "m.oam")
    files = {entry["name"]: entry["sha256"] for entry in report.source["files"]}
    assert "config.json" in files and len(files) == 6
    for name, digest in files.items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()
