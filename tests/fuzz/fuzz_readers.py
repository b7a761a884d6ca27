"""Coverage-guided fuzzing of one reader, with atheris (tests/fuzz/requirements.txt).

    python tests/fuzz/fuzz_readers.py READER [SECONDS] [libFuzzer options]

Starts from tests/fuzz/corpus/READER and collects what it finds under build/fuzz/READER. It ends with an error at the first
input that raises anything but OazooError, takes over ten seconds, or makes the reader hold more than three times the
input's bytes, and a constant.
``python tests/fuzz/fuzz_readers.py READER --minimise`` folds build/fuzz/READER into the corpus.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))
with atheris.instrument_imports(include=["oazoo"], enable_loader_override=False):
    from fuzz_targets import FACTOR, SLACK, TARGETS

LONGEST = 1 << 14
#: Memory is traced at every one of so many runs, because tracing makes a run three times as long.
MEASURED = 4
#: Larger inputs than this are not kept in the repository.
KEPT = 1 << 13


def main(arguments: list[str]) -> int:
    """Command line."""
    if not arguments or arguments[0] not in TARGETS:
        print(f"{__doc__}\nreaders: {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    reader, *rest = arguments
    seconds = rest.pop(0) if rest and rest[0].isdecimal() else "600"
    corpus, found = HERE / "corpus" / reader, ROOT / "build" / "fuzz" / reader
    found.mkdir(parents=True, exist_ok=True)
    if rest == ["--minimise"]:
        return _minimise(corpus, found)
    fuzz(
        reader,
        [
            f"-max_total_time={seconds}",
            f"-max_len={LONGEST}",
            "-timeout=10",
            "-rss_limit_mb=768",
            "-print_final_stats=1",
            f"-artifact_prefix={found.parent}/{reader}-",
            *rest,
            *([] if any(not option.startswith("-") for option in rest) else [str(found), str(corpus)]),
        ],
    )
    return 0


def fuzz(reader: str, options: list[str]) -> None:
    """Run libFuzzer on a reader; does not return."""
    target = TARGETS[reader]
    folder = Path(tempfile.mkdtemp(prefix=f"oazoo-fuzz-{reader}-", dir=_memory()))

    count = 0

    def once(data: bytes) -> None:
        nonlocal count
        count += 1
        if count % MEASURED:
            target(data, folder)
            return
        tracemalloc.start()
        target(data, folder)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if used > FACTOR * len(data) + SLACK:
            raise MemoryError(f"{used} bytes for an input of {len(data)}")

    # Once before measuring, for what is imported late.
    for path in sorted((HERE / "corpus" / reader).iterdir()):
        target(path.read_bytes(), folder)
    atheris.Setup([sys.argv[0], *options], once)
    atheris.Fuzz()


def _memory() -> str | None:
    """A folder in memory, where there is one: every run writes a file."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _minimise(corpus: Path, found: Path) -> int:
    """Merge what was found into the corpus: the smallest set of inputs that reaches the same code."""
    with tempfile.TemporaryDirectory() as temporary:
        merged = Path(temporary)
        command = [
            sys.executable,
            __file__,
            corpus.name,
            "0",
            "-merge=1",
            str(merged),
            str(corpus),
            str(found),
        ]
        done = subprocess.run(command)
        if done.returncode:
            return done.returncode
        for path in merged.iterdir():
            if path.stat().st_size <= KEPT:
                path.replace(corpus / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
