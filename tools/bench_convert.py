"""What converting costs, against copying: a Llama of 540 MB in f32 SafeTensors, copied and converted by turns.

Every turn starts processes of their own: ``cp``, then a flush of the copy to disk (our output is flushed, too), and
``oazoo convert``, whose start is measured with it. Medians are printed, those of the ratios of one turn, and the peak of
resident memory of the conversion (``ru_maxrss``, which counts pages of mapped files while they are mapped). The modules of
the package are compiled once before, as they are where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of :data:`CONFIG` under their names in the Hub's files."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
        }
    return found | {"model.norm.weight": (hidden,)}


def make_model(folder: Path) -> Path:
    """Write the model of normal values; returns the weights file. Its pages are in the cache afterwards, and on disk."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header: dict[str, Any] = {}
    position = 0
    for name, shape in shapes().items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes().values():
            # In small parts: a child's peak of memory begins at what its parent holds when it starts it.
            for start in range(0, left := int(np.prod(shape)), 1 << 18):
                part = random.standard_normal(min(1 << 18, left - start), np.float32)
                file.write((part * np.float32(0.02)).tobytes())
        file.flush()
        os.fsync(file.fileno())
    return path


def timed(command: Sequence[str], modules: Path) -> tuple[float, int]:
    """Seconds that a process takes, and the peak of its resident memory in bytes; ``modules`` keeps compiled ones."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(modules)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, cwd=modules
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        assert process.stderr is not None
        raise SystemExit(f"{' '.join(command)}: {process.stderr.read().decode()}")
    return seconds, usage.ru_maxrss * 1024


def copied(source: Path, target: Path) -> tuple[float, float]:
    """Seconds that ``cp`` takes, and ``cp`` with a flush to disk."""
    seconds, _ = timed(["cp", str(source), str(target)], source.parent)
    start = time.perf_counter()
    with target.open("rb") as file:
        os.fsync(file.fileno())
    flushed = seconds + time.perf_counter() - start
    target.unlink()
    return seconds, flushed


def measure(folder: Path, turns: int, extra: Sequence[str]) -> dict[str, Any]:
    """Run all turns in ``folder``; see :func:`main` for what comes out."""
    source = make_model(folder)
    rows: list[dict[str, float]] = []
    out = folder / "out.oam"
    program = [sys.executable, "-m", "oazoo", "convert", str(folder), "-o", str(out), "--quiet", *extra]
    modules = folder / "modules"
    modules.mkdir()
    for turn in range(turns + 1):
        copy, flushed = copied(source, folder / "copy.safetensors")
        convert, peak = timed(program, modules)
        out.unlink()
        if turn == 0:
            continue  # the first one compiles the modules
        rows.append({"cp_s": copy, "cp_flushed_s": flushed, "convert_s": convert, "peak_bytes": peak})
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return {
        "bytes": source.stat().st_size,
        "turns": rows,
        **middle,
        "ratio": statistics.median(row["convert_s"] / row["cp_s"] for row in rows),
        "ratio_flushed": statistics.median(row["convert_s"] / row["cp_flushed_s"] for row in rows),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Make the model in a temporary folder, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="where the files go (default: the folder for temporary files)"
    )
    parser.add_argument("--dtype", default="keep", help="as for oazoo convert")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oazoo-bench-", dir=options.folder) as folder:
        result = measure(Path(folder), options.turns, ["--dtype", options.dtype])
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['bytes'] / 1e6:.0f} MB, {options.turns} turns, load {result['load']:.1f}; medians")
    print(f"cp                {result['cp_s']:.2f} s")
    print(f"cp, flushed       {result['cp_flushed_s']:.2f} s")
    print(f"oazoo convert     {result['convert_s']:.2f} s, peak {result['peak_bytes'] / 1e6:.0f} MB")
    print(f"ratio             {result['ratio']:.2f}; to the flushed copy {result['ratio_flushed']:.2f}")


if __name__ == "__main__":
    main()
