"""`make bench`: the numbers of docs/performance.md, measured on this machine with the real commands.

Converts SmolLM2 to f16, packs it to Q8 and Q4, and runs each version in processes of its own: once with no compiled
pipelines on disk (a cold start) and then a few times with them. Prints a Markdown section and leaves it, and the raw
numbers as JSON, in build/bench.

    python tools/bench.py [--runs 3] [--tokens 64]

Speeds are the best of the warm runs, since everything else that a machine does can only slow one down. A start is the time
from starting the process to the first token: interpreter, loading, prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from oazoo.cli.common import format_bytes

MODEL = "smollm2-135m-instruct"
FOLDER = Path("build") / "bench"
#: About 250 tokens of plain text, taken raw, so that every run reads the same prompt.
PROMPT = (
    "The lighthouse stood at the end of the long stone pier, and every evening its keeper climbed the stairs with a "
    "small lamp in his hand. He had counted the steps so often that he no longer noticed them, yet on stormy nights he "
    "counted again, aloud, because the sound of his own voice was better company than the wind. Far below, the fishing "
    "boats came home one after another, and he knew each of them by the way it crossed the bar. "
) * 3


def oazoo(*arguments: str, home: Path | None = None) -> tuple[Any, float]:
    """Run `oazoo … --json` in a process of its own; returns what it printed and the seconds it took."""
    environ = dict(os.environ)
    if home is not None:
        # Mesa keeps compiled kernels in a folder of its own, which would make every start a warm one.
        environ |= {"OAZOO_HOME": str(home), "MESA_SHADER_CACHE_DIR": str((home / "mesa").absolute())}
    started = time.perf_counter()
    command = [sys.executable, "-m", "oazoo", *arguments, "--json", "--quiet"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ)
    if done.returncode != 0:
        sys.exit(f"bench: oazoo {arguments[0]} failed with exit status {done.returncode}")
    return json.loads(done.stdout), time.perf_counter() - started


def measure(path: Path, tokens: int, runs: int) -> dict[str, float]:
    """Cold and warm runs of one version."""
    arguments = ["generate", str(path), "-p", PROMPT, "--raw", "--temperature", "0", "--ignore-eos"]
    arguments += ["--max-tokens", str(tokens)]
    home = FOLDER / "home"
    shutil.rmtree(home, ignore_errors=True)  # compiled pipelines live there
    results = []
    for number in range(runs + 1):
        print(f"bench: {path.name}, {'cold' if number == 0 else f'warm {number}'}", file=sys.stderr)
        result, seconds = oazoo(*arguments, home=home)
        results.append({**result["timings"], "start_s": seconds - result["timings"]["decode_s"]})
        results[-1]["prompt_tokens"] = result["prompt_tokens"]
    cold, warm = results[0], results[1:]
    return {
        "bytes": path.stat().st_size,
        "prompt_tokens": cold["prompt_tokens"],
        "prefill_tokens_per_s": max(result["prefill_tokens_per_s"] for result in warm),
        "decode_tokens_per_s": max(result["decode_tokens_per_s"] for result in warm),
        "load_s": min(result["load_s"] for result in warm),
        "cold_start_s": cold["start_s"],
        "warm_start_s": min(result["start_s"] for result in warm),
    }


def machine_speed() -> float:
    """GFLOP/s of NumPy's own float32 product [128, 576] × [576, 1536]: what else the machine is doing shows in it."""
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(shape, np.float32) for shape in ((128, 576), (576, 1536)))
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(20):
            a @ b
        best = max(best, 20 * 2 * 128 * 576 * 1536 / (time.perf_counter() - started) / 1e9)
    return best


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="warm runs of each version (default 3)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default 64)")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)

    device = oazoo("doctor")[0]["vulkan"]
    oazoo("pull", MODEL)
    whole = FOLDER / f"{MODEL}-f16.oam"
    _, convert_s = oazoo("convert", MODEL, "-o", str(whole), "--dtype", "f16", "--force")
    files, packing = {"f16": whole}, {}
    for target in ("q8", "q4"):
        files[target] = FOLDER / f"{MODEL}-{target}.oam"
        command = [
            "quantize",
            str(whole),
            "-o",
            str(files[target]),
            "--to",
            target,
            "--method",
            "absmax",
            "--force",
        ]
        oazoo(*command)  # compiles the packing kernel
        packing[target], _ = oazoo(*command)
    before = machine_speed()
    measured = {name: measure(path, options.tokens, options.runs) for name, path in files.items()}
    speeds = sorted((before, machine_speed()))

    chosen = next(d for d in device["devices"] if d["index"] == device["chosen"])
    lines = [
        f"{MODEL} on {chosen['name']} ({chosen['driver']}); {processor()}, {os.cpu_count()} cores; "
        f"prompt of {measured['f16']['prompt_tokens']} tokens, {options.tokens} generated. NumPy's float32 product ran at "
        f"{speeds[0]:.0f} to {speeds[1]:.0f} GFLOP/s at the time.",
        "",
        "| | file | prompt tokens/s | decode tokens/s | load s | warm start s | cold start s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, m in measured.items():
        lines.append(
            f"| {name} | {format_bytes(m['bytes'])} | {m['prefill_tokens_per_s']:.0f} | {m['decode_tokens_per_s']:.1f} "
            f"| {m['load_s']:.2f} | {m['warm_start_s']:.2f} | {m['cold_start_s']:.2f} |"
        )
    lines += ["", f"Converting to f16 takes {convert_s:.1f} s. Packing the f16 file:", ""]
    for target, report in packing.items():
        dense = sum(tensor["bytes_before"] for tensor in report["tensors"] if not tensor["reason"])
        speed = dense / report["seconds"] / 1e9
        lines.append(f"- to {target}: {report['seconds']:.2f} s, {speed:.2f} GB/s of dense weights")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    (FOLDER / "performance.md").write_text(text, encoding="utf-8")
    numbers = {
        "device": chosen,
        "convert_s": convert_s,
        "packing": packing,
        "versions": measured,
        "numpy_gflops": speeds,
    }
    (FOLDER / "performance.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
