"""What quantising costs, against llama.cpp's own: SmolLM2-135M in f32 (540 MB) to q8 and q4, by turns.

    python tools/bench_quantize.py [--llama PYTHON] [--turns 3] [--model DENSE.oam] [--method search] [--prepared FOLDER]

``--llama`` is an interpreter that has the package ``cyllama``; without it only ours is measured. The same weights are given
to both: an ``.oam``, and the GGUF that ``oazoo export`` makes of it. llama.cpp's time is that of its call
``llama_model_quantize``, every tensor to the one type (``--pure``), as many threads as the machine has cores; ours
is the whole command: interpreter, imports, opening the device, packing, checksums, the flush to disk. Llama.cpp flushes
nothing, so both ratios are printed: to its call, and to its call with a flush behind. Medians, those of the ratios of one
turn, and the peak of resident memory (``ru_maxrss``). Modules and kernels are compiled once before. Each row is
told on the error stream as it is done. Making the two models takes longer than measuring: ``--prepared FOLDER`` keeps
them there for the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_convert import timed

MODEL = "smollm2-135m-instruct"
#: Encoding and method of each row.
ROWS = (("q8", "absmax"), ("q4", "absmax"), ("q4", "search"))
#: What the interpreter with cyllama runs: source, target, type of file, threads.
_LLAMA = """
import os, sys, time
from cyllama.llama import llama_cpp
options = llama_cpp.LlamaModelQuantizeParams()
options.ftype, options.nthread, options.pure = int(sys.argv[3]), int(sys.argv[4]), True
start = time.perf_counter()
llama_cpp.model_quantize(sys.argv[1], sys.argv[2], options)
done = time.perf_counter()
handle = os.open(sys.argv[2], os.O_RDONLY)
os.fsync(handle)
print(done - start, time.perf_counter() - start)
"""
_FILE_TYPES = {"q8": 7, "q4": 2}  # LLAMA_FTYPE_MOSTLY_Q8_0 and _Q4_0


def llama(python: Path, source: Path, target: Path, encoding: str) -> tuple[float, float]:
    """Seconds of llama.cpp's call, and of the call and a flush."""
    arguments = [str(source), str(target), str(_FILE_TYPES[encoding]), str(os.cpu_count() or 1)]
    done = subprocess.run(
        [str(python), "-c", _LLAMA, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    target.unlink(missing_ok=True)
    if done.returncode:
        raise SystemExit(f"bench: llama.cpp could not quantise {source}")
    plain, flushed = (float(text) for text in done.stdout.split()[-2:])
    return plain, flushed


def ours(source: Path, target: Path, encoding: str, method: str, modules: Path) -> tuple[float, int]:
    """Seconds of the whole command, and its peak of memory in bytes."""
    program = [sys.executable, "-m", "oazoo", "quantize", str(source), "-o", str(target), "--to", encoding]
    seconds, peak = timed([*program, "--method", method, "--quiet"], modules)
    target.unlink()
    return seconds, peak


def make(arguments: Sequence[str]) -> None:
    """Run a command of ours that prepares something."""
    subprocess.run([sys.executable, "-m", "oazoo", *arguments, "--quiet"], check=True)


def measure(
    folder: Path,
    source: Path,
    gguf: Path,
    python: Path | None,
    rows: Sequence[tuple[str, str]],
    turns: int,
) -> list[dict[str, Any]]:
    """All rows, turn by turn; see :func:`main` for what comes out."""
    modules = folder / "modules"
    modules.mkdir()
    if python is not None and not gguf.exists():
        make(["export", str(source), "-o", str(gguf)])
    results: list[dict[str, Any]] = []
    for encoding, method in rows:
        found: list[dict[str, float]] = []
        ours(source, folder / "out.oam", encoding, method, modules)
        for _ in range(turns):
            row: dict[str, float] = {}
            if python is not None:
                row["llama_s"], row["llama_flushed_s"] = llama(python, gguf, folder / "out.gguf", encoding)
            row["oazoo_s"], row["peak_bytes"] = ours(source, folder / "out.oam", encoding, method, modules)
            found.append(row)
        result: dict[str, Any] = {"encoding": encoding, "method": method, "load": os.getloadavg()[0]}
        result |= {key: statistics.median(row[key] for row in found) for key in found[0]}
        if python is not None:
            for name in ("llama", "llama_flushed"):
                ratios = (row["oazoo_s"] / row[f"{name}_s"] for row in found)
                result[f"ratio_to_{name}"] = statistics.median(ratios)
        results.append({**result, "turns": found})
        print(f"bench: {encoding} {method}: {result['oazoo_s']:.2f} s", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Make the model in a temporary folder, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--llama", type=Path, metavar="PYTHON", help="an interpreter that has cyllama")
    parser.add_argument("--model", type=Path, help="a dense .oam  [default: SmolLM2-135M, made f32]")
    parser.add_argument("--method", help="only this one  [default: absmax, and search for q4]")
    parser.add_argument("--folder", type=Path, help="where the files go")
    parser.add_argument(
        "--prepared", type=Path, metavar="FOLDER", help="keep both models here, and find them next time"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.method in (None, row[1])] or [("q4", options.method)]
    with tempfile.TemporaryDirectory(prefix="oazoo-bench-", dir=options.folder) as name:
        folder = Path(name)
        if options.prepared and options.model:
            parser.error("--prepared keeps the default model; leave --model out")
        kept = options.prepared or folder
        kept.mkdir(parents=True, exist_ok=True)
        source = options.model or kept / "dense.oam"
        if not source.exists():
            make(["convert", MODEL, "-o", str(source), "--dtype", "f32"])
        size = source.stat().st_size
        results = measure(folder, source, kept / "dense.gguf", options.llama, rows, options.turns)
    if options.json:
        print(json.dumps({"bytes": size, "rows": results}, indent=2))
        return
    print(f"{size / 1e6:.0f} MB, {options.turns} turns; medians\n")
    print("| | llama.cpp s | flushed s | oazoo s | ratio | to flushed | peak MB | load |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in results:
        cells = [f"{row['encoding']} {row['method']}"]
        for key in ("llama_s", "llama_flushed_s", "oazoo_s", "ratio_to_llama", "ratio_to_llama_flushed"):
            cells.append(f"{row[key]:.2f}" if key in row else "-")
        cells += [f"{row['peak_bytes'] / 1e6:.0f}", f"{row['load']:.1f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
