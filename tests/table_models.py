"""One tiny model for each row of the table in docs/translation.md, and what each cell of a row does with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expert_models
import mamba_models
import numpy as np
import numpy.typing as npt
import onnx
from checkpoints import (
    LLAMA,
    bpe_metadata,
    gguf_names,
    llama_folder,
    llama_metadata,
    llama_tensors,
    write_gguf,
    write_hf,
)
from family_folders import bent, golden
from gguf import GGUFEndian
from model_goldens import DATA, source_path
from onnx import TensorProto, helper, numpy_helper
from torch_files import save_tensors

Array = npt.NDArray[Any]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@dataclass(frozen=True)
class Row:
    """A row's model: ``make`` writes it and gives its path; ``golden`` names its reference logits.

    ``graphs`` are goldens that other exporters than ours wrote as ONNX.
    """

    make: Callable[[Path], Path]
    golden: str | None = None
    graphs: tuple[str, ...] = ()


def _golden(name: str, *graphs: str) -> Row:
    return Row(lambda folder: source_path(name), name, graphs)


def _llama(**changes: Any) -> Row:
    return Row(lambda folder: llama_folder(folder, changes))


def _experts(family: str, **changes: Any) -> Row:
    config = expert_models.config_of(family, **changes)
    return Row(lambda folder: write_hf(folder, config, expert_models.tensors(family, config)))


def _tied(folder: Path) -> Path:
    def drop(tensors: dict[str, Array]) -> None:
        del tensors["embed_out.weight"]

    return bent(folder, "gpt_neox", {"tie_word_embeddings": True}, drop)


def _seeing(folder: Path) -> Path:
    """Gemma 3 as it is published with its eyes: the language model's names and settings one level down."""
    config, tensors = golden("gemma3_six")
    outer = {key: config.pop(key) for key in ("architectures", "tie_word_embeddings")}
    outer |= {"model_type": "gemma3", "text_config": config, "vision_config": {"hidden_size": 8}}
    outer["architectures"] = ["Gemma3ForConditionalGeneration"]
    named = {key.replace("model.", "language_model.model.", 1): value for key, value in tensors.items()}
    named["vision_tower.vision_model.post_layernorm.weight"] = np.ones(8, np.float32)
    return write_hf(folder, outer, named)


def _mamba_gguf(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(folder / "m.gguf", mamba_models.GGUF, mamba_models.gguf_tensors())


ROWS: dict[str, Row] = {
    "Llama 1, 2": _golden("llama"),
    "SmolLM, SmolLM2": _golden("llama_tied_bf16"),
    "Llama 3 (`llama3` scaling)": _llama(rope_scaling=LLAMA3, rope_theta=500000.0),
    "Llama, linear scaling": _llama(rope_scaling={"type": "linear", "factor": 2.0}),
    "Llama, YaRN": _llama(rope_scaling=YARN),
    "Llama, YaRN with scales of its own": _llama(rope_scaling=YARN | {"attention_factor": 1.5}),
    "Llama, dynamic scaling": _llama(rope_scaling={"type": "dynamic", "factor": 2.0}),
    "Mistral": _llama(**MISTRAL, sliding_window=8),
    "Qwen2": _golden("qwen2"),
    "Qwen2, windows in some layers": _llama(
        **QWEN2, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "Qwen3": _golden("qwen3"),
    "Phi-3": _golden("phi3"),
    "Phi-3, LongRoPE": _golden("phi3_longrope"),
    "Gemma 2": _golden("gemma2"),
    "Gemma 3": _golden("gemma3_six"),
    "Gemma 3, another scale of scores": _golden("gemma3"),
    "Gemma 3 with vision (its language model)": Row(_seeing, "gemma3_six"),
    "OLMo 2": _golden("olmo2"),
    "GPT-NeoX, Pythia": _golden("gpt_neox"),
    "GPT-NeoX, one sublayer after the other, tied": _golden("gpt_neox_serial"),
    "GPT-2": _golden("gpt2"),
    "NanoGPT": _golden("nanogpt_script/ckpt.pt", "nanogpt_script/model.onnx", "nanogpt_dynamo/model.onnx"),
    "NanoGPT without biases": _golden("nanogpt_nobias_script/ckpt.pt", "nanogpt_nobias_script/model.onnx"),
    "Mixtral": _experts("mixtral"),
    "Qwen2-MoE": _experts("qwen2"),
    "Qwen3-MoE": _experts("qwen3"),
    "Qwen3-MoE, some layers without experts": _experts("qwen3", mlp_only_layers=[1]),
    "Mamba, logarithm of the decay (weights)": Row(
        lambda folder: write_hf(folder, mamba_models.HF, mamba_models.tensors())
    ),
    "Mamba of state-spaces (weights)": Row(
        lambda folder: write_hf(folder, mamba_models.ORIGINAL, mamba_models.tensors("embedding"))
    ),
    "Mamba, the decay itself (weights)": Row(_mamba_gguf),
    "Mamba-3 (weights)": Row(lambda folder: DATA / "mamba3" / "lm_siso"),
}


def bare_graph(tensors: dict[str, Array], path: Path) -> Path:
    """Weights in the initialisers of a graph that another exporter could have written."""
    names = list(tensors)
    first = next(name for name in names if tensors[name].ndim == 2)
    stored = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in tensors.items()]
    nodes = [helper.make_node("Gather", [first, "ids"], ["x"])]
    nodes += [helper.make_node("Identity", [name], [f"kept_{n}"]) for n, name in enumerate(names)]
    nodes.append(helper.make_node("MatMul", ["x", "turned"], ["logits"]))
    stored.append(numpy_helper.from_array(np.asarray(tensors[first].T, np.float32).copy(), "turned"))
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        stored,
    )
    onnx.save(helper.make_model(graph), path)
    return path


def gguf_of(tensors: dict[str, Array], architecture: str, path: Path, **metadata: Any) -> Path:
    """Weights in a GGUF file that says no more than whose architecture it is, and what ``metadata`` says."""
    values = {name: np.asarray(value, np.float32) for name, value in tensors.items()}
    extra = {key.replace("__", "."): value for key, value in metadata.items()}
    return write_gguf(path, {"general.architecture": architecture, **extra}, values)


# What is refused besides


def _declared(architecture: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda folder: llama_folder(folder, {"architectures": [architecture], **changes})


def _old_mixtral(folder: Path) -> Path:
    """Each expert in a tensor of its own, as llama.cpp wrote them in December 2023 and reads them no more."""
    tensors = gguf_names(llama_tensors(LLAMA))
    for layer in range(2):
        for part in ("gate", "up", "down"):
            value = tensors.pop(f"blk.{layer}.ffn_{part}.weight")
            tensors |= {f"blk.{layer}.ffn_{part}.{expert}.weight": value for expert in range(2)}
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = np.ones((2, 32), np.float32)
    folder.mkdir()
    experts = {"llama.expert_count": 2, "llama.expert_used_count": 2}
    return write_gguf(folder / "m.gguf", llama_metadata() | experts, tensors)


def _llama_gguf(arch: str = "llama", **changes: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        metadata = {k: v for k, v in (bpe_metadata() | changed).items() if v is not None}
        rows = len(metadata["tokenizer.ggml.tokens"])
        tensors = gguf_names(llama_tensors(LLAMA | {"vocab_size": rows}))
        return write_gguf(folder / "m.gguf", llama_metadata(rows, arch) | metadata, tensors)

    return make


def _olmo3_gguf(folder: Path) -> Path:
    folder.mkdir()
    metadata = llama_metadata(40, "olmo2") | {"olmo2.attention.sliding_window": 8}
    return write_gguf(folder / "m.gguf", metadata, gguf_names(llama_tensors(LLAMA)))


def _big_endian(folder: Path) -> Path:
    folder.mkdir()
    tensors = gguf_names(llama_tensors(LLAMA))
    return write_gguf(folder / "m.gguf", llama_metadata(), tensors, endianess=GGUFEndian.BIG)


def _pytorch_bin(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(mamba_models.ORIGINAL))
    save_tensors(folder / "pytorch_model.bin", mamba_models.tensors("embedding"))
    return folder


def _mamba(changes: dict[str, Any]) -> Callable[[Path], Path]:
    config = mamba_models.ORIGINAL | changes
    return lambda folder: write_hf(folder, config, mamba_models.tensors("embedding"))


#: Sources that are recognised and not translated; the names are those of the second table.
REFUSED: dict[str, Callable[[Path], Path]] = {
    "an architecture that is not known, such as `GemmaForCausalLM`": _declared("GemmaForCausalLM"),
    "the same in GGUF, such as `bert`": _llama_gguf("bert"),
    "SmolLM3 (layers without positions)": _declared("SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
    "SmolLM3, read as a Llama": _declared("LlamaForCausalLM", no_rope_layers=[1, 0]),
    "OLMo 3 (`Olmo3ForCausalLM`)": _declared("Olmo3ForCausalLM"),
    "OLMo 3 in GGUF (attention windows)": _olmo3_gguf,
    "Llama 4": _declared("Llama4ForCausalLM"),
    "Mamba-2 of state-spaces": _mamba({"ssm_cfg": {"layer": "Mamba2"}}),
    "`Mamba2ForCausalLM`": _declared("Mamba2ForCausalLM"),
    "FalconMamba": _declared("FalconMambaForCausalLM"),
    "Mamba with layers of attention": _mamba({"attn_layer_idx": [1]}),
    "a folder with `pytorch_model.bin` alone": _pytorch_bin,
    "Mixtral in GGUF with a tensor for each expert (before April 2024)": _old_mixtral,
    "GPTQ, AWQ, bitsandbytes and other packed checkpoints": _declared(
        "LlamaForCausalLM", quantization_config={"quant_method": "gptq", "bits": 4}
    ),
    "a rotary scaling that is not known": _declared(
        "LlamaForCausalLM", rope_scaling={"rope_type": "spiral", "factor": 2.0}
    ),
    "big-endian GGUF": _big_endian,
    "a WordPiece tokenizer in GGUF": _llama_gguf(model="bert"),
    "a Unigram tokenizer in GGUF (T5)": _llama_gguf(model="t5"),
    "a pre-tokenizer that is not known": _llama_gguf(pre="jina-v2-code"),
    "a byte-level tokenizer in GGUF that names no pre-tokenizer": _llama_gguf(pre=None),
}
