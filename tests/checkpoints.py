"""Tiny checkpoints made on the spot with the formats' own packages, to be bent in every way a test needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[Any]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 40,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 24,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 2,
}


def llama_tensors(config: Mapping[str, Any], seed: int = 0, dtype: Any = np.float32) -> dict[str, Array]:
    """Random weights of :func:`llama_shapes`."""
    return _random(llama_shapes(config), seed, dtype)


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names of a Llama, with the shapes that the config means."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads") or heads
    qwen = config["architectures"] == ["Qwen2ForCausalLM"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", heads * dim, hidden, config.get("attention_bias") or qwen),
            ("self_attn.k_proj", kv * dim, hidden, config.get("attention_bias") or qwen),
            ("self_attn.v_proj", kv * dim, hidden, config.get("attention_bias") or qwen),
            ("self_attn.o_proj", hidden, heads * dim, config.get("attention_bias")),
            ("mlp.gate_proj", inner, hidden, config.get("mlp_bias")),
            ("mlp.up_proj", inner, hidden, config.get("mlp_bias")),
            ("mlp.down_proj", hidden, inner, config.get("mlp_bias")),
        ):
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def gpt2_tensors(config: Mapping[str, Any], seed: int = 0, prefix: str = "transformer.") -> dict[str, Array]:
    """Random GPT-2 weights, linear layers as Conv1D stores them."""
    width, inner = config["n_embd"], config.get("n_inner") or 4 * config["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config["vocab_size"], width),
        "wpe.weight": (config["n_positions"], width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    for layer in range(config["n_layer"]):
        at = f"h.{layer}"
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, inner),
            ("mlp.c_proj", inner, width),
        ):
            shapes[f"{at}.{name}.weight"], shapes[f"{at}.{name}.bias"] = (rows, columns), (columns,)
        for name in ("ln_1", "ln_2"):
            shapes[f"{at}.{name}.weight"] = shapes[f"{at}.{name}.bias"] = (width,)
    return {prefix + name: value for name, value in _random(shapes, seed, np.float32).items()}


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: Any) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {name: (random.normal(size=shape) * 0.1).astype(dtype) for name, shape in shapes.items()}


def write_hf(folder: Path, config: Any, tensors: Mapping[str, Array], **files: Any) -> Path:
    """A Hugging Face folder. Further files by name, ``__`` standing for the dot: text, bytes, or JSON values."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors"
    )
    for name, value in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


def llama_folder(folder: Path, changes: Mapping[str, Any] | None = None, **files: Any) -> Path:
    """A tiny Llama folder with some settings changed; a setting changed to ``...`` is left out."""
    config = {key: value for key, value in (LLAMA | dict(changes or {})).items() if value is not ...}
    return write_hf(folder, config, llama_tensors(config), **files)


BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + n) for n in range(256 - len(BYTES))]


def bpe_metadata() -> dict[str, Any]:
    """Tokenizer metadata of a byte-level BPE vocabulary: the 256 bytes, six merges, three control tokens."""
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "l l"]
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges), "<s>", "<|end|>", "<pad>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }


def llama_metadata(vocab: int = 40, arch: str = "llama") -> dict[str, Any]:
    """GGUF hyper-parameters of the tiny Llama of :data:`LLAMA`."""
    return {
        "general.architecture": arch,
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": 32,
        f"{arch}.block_count": 2,
        f"{arch}.feed_forward_length": 48,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.vocab_size": vocab,
    }


_GGUF_WORDS = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers", "blk"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.", "attn_"),
    ("mlp.", "ffn_"),
    ("_proj", ""),
)


def gguf_names(tensors: Mapping[str, Array], permute: bool = True) -> dict[str, Array]:
    """Hugging Face tensors of the tiny Llama as llama.cpp's converter stores them: names, and q and k rows."""
    result = {}
    for name, value in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]) if permute else None
        if heads:
            rest = value.shape[1:]
            value = (
                value.reshape(heads, 2, len(value) // heads // 2, *rest).swapaxes(1, 2).reshape(value.shape)
            )
        for old, new in _GGUF_WORDS:
            name = name.replace(old, new)
        result[name] = np.ascontiguousarray(value)
    return result


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Array], kind: str = "F32", **options: Any
) -> Path:
    """A GGUF file; matrices are stored as ``kind`` (F32, F16, BF16, or a type that the gguf package can quantise)."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"], **options)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    number = gguf.GGMLQuantizationType[kind]
    for name, value in tensors.items():
        if value.ndim > 1 and kind != "F32":
            data = gguf.quants.quantize(value.astype(np.float32), number)
            writer.add_tensor(name, data, raw_dtype=number)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
