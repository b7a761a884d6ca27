"""`make bench-quality`: what each way of quantising costs SmolLM2, measured on a text.

Converts the model to f32, calibrates it once, makes every version of it with the real command, and holds all of them
against f32 at once, window by window, as `oazoo eval` does. Prints a Markdown table; that and the
numbers as JSON lie in build/quality.

    python tools/bench_quality.py [--methods f32,q8,q4-mixed] [--also 'NAME=--to q4 --keep "embed*"'] [--text FILE]
                                  [--context 512] [--windows N] [--model NAME] [--json] [--resume]

The text is the GPL-3 as Debian's package base-files has it, unless another is given. On a software device a version takes
minutes; `--resume` takes files that an earlier run made, so that it can be done in parts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oazoo
from oazoo.formats.oam import OamSource
from oazoo.zoo.evaluate import Evaluation, evaluate_all

MODEL = "smollm2-135m-instruct"
TEXT = Path("/usr/share/common-licenses/GPL-3")
FOLDER = Path("build") / "quality"
STATS = FOLDER / "stats.safetensors"
#: The versions by name, as arguments of `oazoo quantize`. f32 is the reference itself; f16 and bf16 are conversions.
METHODS: dict[str, str] = {
    "f32": "",
    "f16": "",
    "bf16": "",
    "q8-absmax": "--recipe q8 --method absmax",
    "q8": "--recipe q8",
    "q4-absmax": "--recipe q4 --method absmax",
    "q4-search": "--recipe q4 --method search",
    "q4-weighted": "--recipe q4 --method weighted --stats STATS",
    "q4-weighted-tuned": "--recipe q4 --method weighted --stats STATS --tune",
    "q4-weighted-equalized": "--recipe q4 --method weighted --stats STATS --equalize",
    "q4-gptq": "--recipe q4 --stats STATS",
    "q4-gptq-tuned": "--recipe q4 --stats STATS --tune",
    "q4-gptq-equalized": "--recipe q4 --stats STATS --equalize",
    "q4-gptq-along": "--recipe q4 --method gptq",
    "q4-mixed-weighted": "--recipe q4-mixed --method weighted --stats STATS",
    "q4-mixed": "--recipe q4-mixed --stats STATS",
    "q4-mixed-tuned": "--recipe q4-mixed --stats STATS --tune",
    "q4-high-weighted": "--recipe q4-high --method weighted --stats STATS",
    "q4-high": "--recipe q4-high --stats STATS",
    "q4-high-tuned": "--recipe q4-high --stats STATS --tune",
}
#: Those that take longest, or lose as good as nothing, only if they are asked for.
DEFAULT = ",".join(name for name in METHODS if name not in ("f16", "bf16", "q4-gptq-along"))


def oazoo_command(*arguments: str) -> None:
    """Run `oazoo` as a person would; ends the bench when it fails."""
    print(f"$ oazoo {shlex.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "oazoo", *arguments], stdout=sys.stderr)
    if done.returncode != 0:
        sys.exit(f"bench-quality: this step failed with exit status {done.returncode}")


def make(name: str, how: str, model: str, resume: bool) -> Path:
    """The file of one version, made anew unless it is there and ``resume``."""
    path = FOLDER / f"{name}.oam"
    if resume and path.exists():
        return path
    if how:
        if "STATS" in how.split() and not STATS.exists():
            oazoo_command("calibrate", str(FOLDER / "f32.oam"), "--covariance", "-o", str(STATS))
        arguments = [str(STATS) if word == "STATS" else word for word in shlex.split(how)]
        oazoo_command("quantize", str(FOLDER / "f32.oam"), "-o", str(path), "--force", *arguments)
    else:
        oazoo_command("convert", model, "-o", str(path), "--dtype", name, "--force")
    return path


def row(name: str, how: str, path: Path, found: Evaluation) -> dict[str, Any]:
    """One line of the table as numbers."""
    with OamSource(path) as source:
        stored = sum(tensor.info.nbytes for tensor in source.values())
        values = sum(tensor.info.numel for tensor in source.values())
    return {
        "name": name,
        "arguments": how.replace("STATS", "stats.safetensors"),
        "file_bytes": path.stat().st_size,
        "bits_per_weight": 8 * stored / values,
        **found.to_json(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    head = ["", "MB", "bits a weight", "perplexity", "ratio", "mean KL", "99.9 % KL", "same top", "quantize"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 2)}---|"]
    for r in rows:
        c = r["comparison"]
        cells = [
            r["name"],
            f"{r['file_bytes'] / 1e6:.1f}",
            f"{r['bits_per_weight']:.2f}",
            f"{r['perplexity']:.3f} ± {r['perplexity_error']:.2f}",
            f"{c['perplexity_ratio']:.4f}",
            f"{c['kl_mean']:.2g}",
            f"{c['kl_999']:.2g}",
            f"{c['same_top']:.1%}",
            f"`{r['arguments']}`" if r["arguments"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def progress_lines() -> Callable[..., None]:
    """Windows as they are done; nothing else."""

    def show(label: str, done: int, total: int | None, unit: str = "bytes") -> None:
        if unit == "windows":
            end = "\r" if sys.stderr.isatty() and done != total else "\n"
            print(f"bench-quality: window {done} of {total}", end=end, file=sys.stderr, flush=True)

    return show


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=DEFAULT, help=f"of {', '.join(METHODS)}; default {DEFAULT}")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=ARGUMENTS",
        help="arguments of oazoo quantize; STATS stands for the file of oazoo calibrate",
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--resume", action="store_true", help="take files that an earlier run made")
    options = parser.parse_args()
    wanted: dict[str, str] = {}
    for name in options.methods.split(","):
        if name not in METHODS:
            parser.error(
                f"there is no method {name!r}; there are {', '.join(METHODS)} (or --also NAME=ARGUMENTS)"
            )
        wanted[name] = METHODS[name]
    for entry in options.also:
        name, equals, how = entry.partition("=")
        if not equals or not how or not name.replace("-", "").replace(".", "").isalnum():
            parser.error(f"--also {entry!r}: write NAME=ARGUMENTS, the arguments those of oazoo quantize")
        wanted[name] = how
    if not options.text.is_file():
        sys.exit(f"bench-quality: {options.text} is not there; name a text with --text FILE")
    text = options.text.read_text(encoding="utf-8")

    FOLDER.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        STATS.unlink(missing_ok=True)  # of another version, or another model
    reference = make("f32", "", options.model, options.resume)
    paths = {
        name: reference if name == "f32" else make(name, how, options.model, options.resume)
        for name, how in wanted.items()
    }
    original = oazoo.load(reference)
    versions = [original if name == "f32" else path for name, path in paths.items()]
    found = evaluate_all(
        versions,
        text,
        against=original,
        context=options.context,
        windows=options.windows,
        progress=progress_lines(),
    )
    rows = [
        row(name, wanted[name], path, one) for (name, path), one in zip(paths.items(), found, strict=True)
    ]
    (FOLDER / "quality.json").write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    shown = table(rows)
    (FOLDER / "quality.md").write_text(shown + "\n", encoding="utf-8")
    first = found[0]
    if options.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        print(shown)
        print(
            f"\n{options.model} on {options.text.name}: {first.tokens:,} tokens scored in {first.windows} windows of "
            f"{first.context}; {first.device}; {first.seconds:.0f} s for all versions together"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
