"""`make bench-finetune`: what LoRA over a Q8 base learns of a style in a quarter of an hour, and what comes of it after.

    python tools/finetune_text.py build/finetune/text
    python tools/bench_finetune.py build/finetune/text build/finetune/run [MODEL] [--minutes 14.5] [-- more options]

Runs the real commands: `finetune --lora` for so many minutes on train.txt, `eval` of test.txt before and after, `merge`, and
`export` to SafeTensors and GGUF. Aims: the adapter lowers held-out perplexity by at least 30 percent, and the merged model,
packed anew, keeps it within 2 percent. MODEL is smollm2-135m-instruct unless given; it is packed to Q8 first where it is not
an .oam file. What follows `--` goes to `finetune`. Leaves `figures.json` beside the run; exits with 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
#: Rows of 256 tokens, two a step: steps enough for a schedule within the time, of rows enough for the processor.
RECIPE = ["--lora", "16", "--batch-size", "2", "--context", "256", "--validation", "0", "--seed", "1"]
LOWER, KEPT = 0.7, 1.02


def oazoo(*arguments: str | Path) -> dict[str, Any]:
    """What a command says with --json; its own words go to the terminal."""
    print("$ oazoo", *arguments, flush=True)
    command = [sys.executable, "-m", "oazoo", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"bench-finetune: the command ended with {done.returncode}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--minutes", type=float, default=14.5)
    parser.add_argument("more", nargs="*", help="options of finetune, after --")
    asked = parser.parse_args()
    out: Path = asked.out
    if (out / "tuned").exists():
        sys.exit(f"bench-finetune: {out / 'tuned'} holds a run already; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    base = Path(asked.model)
    if base.suffix != ".oam":
        base = out / "base.oam"
        oazoo("quantize", asked.model, "--to", "q8", "-o", base, "--force")
    test, tuned = asked.text / "test.txt", out / "tuned"

    def perplexity(model: Path, *options: str | Path) -> float:
        found = oazoo("eval", model, "--text", test, "--context", "256", *options)
        print(f"  perplexity {found['perplexity']:.3f}", flush=True)
        return float(found["perplexity"])

    figures: dict[str, Any] = {"before": perplexity(base)}
    start = time.perf_counter()
    run = oazoo(
        "finetune", base, *RECIPE, "--epochs", "10", "--minutes", str(asked.minutes), *asked.more,
        "--data", asked.text / "train.txt", "-o", tuned,
    )  # fmt: skip
    figures["seconds"] = time.perf_counter() - start
    figures["summary"] = run["summary"]
    figures["adapter"] = perplexity(base, "--adapter", tuned / "adapter")
    merged = out / "merged.oam"
    oazoo("merge", base, tuned / "adapter", "-o", merged, "--force")
    figures["merged"] = perplexity(merged)
    oazoo("export", merged, "-o", out / "merged.safetensors", "--force")
    oazoo("export", merged, "-o", out / "merged.gguf", "--force")
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", "utf-8")

    lower = figures["adapter"] / figures["before"]
    kept = figures["merged"] / figures["adapter"]
    summary = figures["summary"]
    print(
        f"held-out perplexity {figures['before']:.3f} → {figures['adapter']:.3f} ({lower - 1:+.1%}), merged "
        f"{figures['merged']:.3f}; finetune took {figures['seconds'] / 60:.1f} minutes: {summary['steps']} steps, "
        f"{summary['tokens_per_second']:.0f} tokens/s"
    )
    met = lower <= LOWER and kept <= KEPT and figures["seconds"] <= 900
    print(
        "the aims are met"
        if met
        else "an aim is missed: -30 percent within 15 minutes, merged within 2 percent"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
