"""`make demo`: one real model from where it is published to text on this machine's Vulkan device.

Fetches SmolLM2, translates it into an `.oam`, packs it to 8 and 4 bits on the device, looks inside, lets each version
answer the same prompt, and closes with a table of sizes, times and tokens per second. Results lie in build/demo and are
made anew at each run; the fetched model stays in the store, so a second run needs no network.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oazoo.cli.common import emit_table, format_bytes, format_duration

MODEL = "smollm2-135m-instruct"
PROMPT = "What is the capital of France, and what is it known for?"
MAX_TOKENS = 48
FOLDER = Path("build") / "demo"


@dataclass
class Version:
    """One file that was made, and how its answer went."""

    name: str
    path: Path
    made_in: float
    result: dict[str, Any]

    def row(self) -> tuple[str, ...]:
        """The version's line of the closing table."""
        timings = self.result["timings"]
        return (
            self.name,
            format_bytes(self.path.stat().st_size),
            format_duration(self.made_in),
            format_duration(timings["load_s"]),
            format_duration(timings["first_token_s"]),
            f"{timings['prefill_tokens_per_s']:.0f}",
            f"{timings['decode_tokens_per_s']:.1f}",
        )


def run(*arguments: str, keep_output: bool = False) -> tuple[str, float]:
    """Run `oazoo` as a person would, and show the command; ends the demo when it fails.

    With ``keep_output`` its standard output is returned and not shown.
    """
    print(f"\n$ oazoo {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "oazoo", *arguments]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE if keep_output else None, text=True)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        print(
            f"\ndemo: this step failed (exit status {done.returncode}); what it said is above.",
            file=sys.stderr,
        )
        sys.exit(done.returncode)
    return done.stdout or "", seconds


def answer(path: Path) -> dict[str, Any]:
    """Let one version answer the prompt; returns what `oazoo generate --json` tells."""
    limits = ["--max-tokens", str(MAX_TOKENS), "--temperature", "0"]
    output, _ = run("generate", str(path), "-p", PROMPT, *limits, "--json", keep_output=True)
    result: dict[str, Any] = json.loads(output)
    print(result["text"].strip())
    return result


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo; takes no arguments."""
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    run("doctor", "--quiet")
    run("pull", MODEL)

    whole = FOLDER / f"{MODEL}.oam"
    _, seconds = run("convert", MODEL, "-o", str(whole), "--force")
    made = [("converted", whole, seconds)]
    for target in ("q8", "q4"):
        packed = FOLDER / f"{MODEL}-{target}.oam"
        _, seconds = run(
            "quantize", str(whole), "-o", str(packed), "--to", target, "--method", "absmax", "--force"
        )
        made.append((target, packed, seconds))

    listing, _ = run("inspect", str(made[-1][1]), keep_output=True)
    lines = listing.rstrip().splitlines()
    print("\n".join(lines[:40] + ([f"… ({len(lines) - 40} more lines)"] if len(lines) > 40 else [])))

    versions = [Version(name, path, seconds, answer(path)) for name, path, seconds in made]
    print()
    columns = ("Version", "Size", "Made in", "Load", "First token", "Prompt tokens/s", "Decode tokens/s")
    emit_table(columns, [version.row() for version in versions], right=columns[1:], title=MODEL)
    print(f"The files are in {FOLDER}. Go on: oazoo chat {made[-1][1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
