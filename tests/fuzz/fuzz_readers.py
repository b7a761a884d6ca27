"""Coverage-guided fuzzing of one reader, with atheris (tests/fuzz/requirements.txt).

    python tests/fuzz/fuzz_readers.py READER [SECONDS] [libFuzzer options]

Starts from tests/fuzz/corpus/READER and collects what it finds under build/fuzz/READER. It ends with an error at the first
input that raises anything but OazooError, takes over ten seconds, or makes the reader hold more than three times the
input's bytes, and a constant.
``python tests/fuzz/fuzz_readers.py READER --minimise`` folds build/fuzz/READER into the corpus.
"""

from __future__ import annotations

import shutil
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
#: Memory is traced in the first BURST of every CYCLE runs, because tracing makes a run three times as long. It stays on in
#: between: each start of tracemalloc costs the process bytes that it never gets back, which a million of them show.
BURST, CYCLE = 1024, 4096
#: Bytes and files that one run may add to the corpus of a reader.
KEPT = 14_000
MOST = 40


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
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
            f"-artifact_prefix={found.parent}/{reader}-",
            *rest,
            *([] if any("merge" in option for option in rest) else [str(found), str(corpus)]),
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
        turn = count % CYCLE
        count += 1
        if turn == 0:
            tracemalloc.start()
        elif turn == BURST:
            tracemalloc.stop()
        if turn >= BURST:
            target(data, folder)
            return
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        target(data, folder)
        used = tracemalloc.get_traced_memory()[1] - before
        if used > FACTOR * len(data) + SLACK:
            raise MemoryError(f"{used} bytes for an input of {len(data)}")

    # Once before measuring, for what is imported late.
    for path in sorted((HERE / "corpus" / reader).iterdir()):
        target(path.read_bytes(), folder)
    # A merge runs this program again by its first argument, through a shell.
    atheris.Setup([f"{sys.executable} {HERE / 'fuzz_readers.py'} {reader} 0", *options], once)
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
        known = {path.read_bytes() for path in corpus.iterdir()}
        added = [path for path in merged.iterdir() if path.read_bytes() not in known]
        added.sort(key=lambda path: path.stat().st_size)
        size = 0
        for path in added[:: -(-len(added) // MOST) or 1]:  # of all sizes, when there are too many
            size += path.stat().st_size
            if size <= KEPT:
                shutil.move(path, corpus / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
