"""Hugging Face folders and sharded SafeTensors: which files make up the model, and nothing else.

With an index, exactly the files that it names are read; without one there must be a single weights file. What lies beside
them is reported in ``notes``, never read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats.gguf_split import first_part
from oazoo.formats.mapped import MappedFile, open_regular
from oazoo.formats.messages import quoted, some
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.formats.source import SourceTensor, WeightSource
from oazoo.formats.strict_json import Cursor, decode_utf8

INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX = 1 << 26
MAX_SHARDS = 4096
#: The whole model as torch.save writes it: a zip, of which tensors are read without running anything.
TORCH_NAME = "pytorch_model.bin"
_ZIP = b"PK\x03\x04"


class ShardedSource(WeightSource):
    """A SafeTensors model in several files, as an index names them. ``path`` is the index.

    ``notes`` lists files beside the model that were not read, and a stated total size that is not the sum.

    Raises:
        FormatError: index and files disagree in any way; the message names files and tensors.
        UsageError: there is no such index.
    """

    format = "safetensors"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        folder = self.path.parent
        total, weight_map = _read_index(self.path)
        names = sorted(set(weight_map.values()))
        stray = _stray(folder, {self.path.name, *names})
        _check_present(self.path, names, weight_map, stray)
        self._shards: list[SafetensorsSource] = []
        try:
            self._tensors, metadata = self._open(folder, names, weight_map)
        except BaseException:
            self.close()
            raise
        self.files = (self.path, *(folder / name for name in names))
        self.metadata = MappingProxyType(metadata)
        notes = [f"ignored: {name} is not named by {self.path.name}" for name in stray]
        found = sum(tensor.info.nbytes for tensor in self._tensors.values())
        if total is not None and total != found:
            notes.append(f"{self.path.name} states a total size of {total} bytes; its tensors have {found}")
        self.notes = tuple(notes)

    def _open(
        self, folder: Path, names: list[str], weight_map: dict[str, str]
    ) -> tuple[dict[str, SourceTensor], dict[str, Any]]:
        tensors: dict[str, SourceTensor] = {}
        metadata: dict[str, Any] = {}
        wanted: defaultdict[str, set[str]] = defaultdict(set)
        for tensor, file in weight_map.items():
            wanted[file].add(tensor)
        for name in names:
            shard = SafetensorsSource(folder / name)
            self._shards.append(shard)
            metadata.update(shard.metadata)
            missing = sorted(wanted[name] - shard.keys())
            extra = sorted(shard.keys() - wanted[name])
            if missing or extra:
                raise FormatError(
                    f"{folder / name}: does not hold what {self.path.name} says: "
                    + "; ".join(
                        f"{noun}: {some([quoted(tensor) for tensor in these])}"
                        for noun, these in (("missing", missing), ("not in the index", extra))
                        if these
                    )
                    + "; index and files are from different exports, fetch the model again"
                )
            tensors.update(shard)
        # In the order of the index, which is that of the model.
        return {name: tensors[name] for name in weight_map}, metadata

    def close(self) -> None:
        for shard in self._shards:
            shard.close()


def find_weights(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The one file to open for the model in ``folder`` (an index or a weights file), and notes about ignored ones.

    Raises:
        UsageError: there are several candidates, so that the user has to name one; or none.
    """
    files = [path for path in _listed(folder) if path.is_file() and not path.name.startswith(".")]
    candidates = [path for path in files if path.name.endswith(INDEX_SUFFIX)]
    candidates = candidates or [path for path in files if path.suffix == ".safetensors"]
    candidates = candidates or [path for path in files if path.suffix in (".gguf", ".oam")]
    candidates = candidates or [path for path in files if path.suffix == ".onnx"]
    # The parts of one split model are one set of weights.
    whole = first_part([path.name for path in candidates])
    if whole is not None:
        candidates, files = [folder / whole], [path for path in files if path not in candidates]
    pickles = [path.name for path in files if path.suffix in (".bin", ".pt", ".pth", ".ckpt")]
    if len(candidates) == 1:
        chosen = candidates[0]
        others = [path.name for path in files if path.suffix in (".gguf", ".oam") and path != chosen]
        return chosen, tuple(f"ignored: {name} beside {chosen.name}" for name in (*others, *pickles))
    if candidates:
        raise UsageError(
            f"{folder}: holds {len(candidates)} sets of weights; name the one you mean: "
            f"{some([str(path) for path in candidates])}"
        )
    if pickles == [TORCH_NAME] and _is_zip(folder / TORCH_NAME):
        return folder / TORCH_NAME, ()
    if pickles:
        raise UsageError(
            f"{folder}: has only {some(pickles)}, which may be Python pickles: they can run code when loaded and are "
            "never read; take the SafeTensors files of the model (on the Hub, often in the branch refs/pr/…), or convert "
            "them where you trust them: safetensors.torch.save_file(torch.load(FILE, weights_only=True), OUT). A ckpt.pt of "
            "nanoGPT can be named itself: its tensors are read without its code"
        )
    raise UsageError(f"{folder}: holds no weights (no .safetensors, .gguf, .oam or .onnx file)")


def _is_zip(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(len(_ZIP)) == _ZIP


def _read_index(path: Path) -> tuple[int | None, dict[str, str]]:
    file = MappedFile(path)
    try:
        if file.size > MAX_INDEX:
            raise FormatError(f"{path}: an index of {file.size} bytes; at most {MAX_INDEX} are read")
        text = decode_utf8(file.read(0, file.size), str(path))
    finally:
        file.close()
    total: int | None = None
    weight_map: dict[str, str] | None = None
    cursor = Cursor(text, str(path))
    for key in cursor.keys("the index"):
        if key == "metadata":
            stated = cursor.value("metadata")
            if not isinstance(stated, dict):
                raise FormatError(f"{path}: metadata must be an object")
            size = stated.get("total_size")
            total = int(size) if isinstance(size, (int, float)) and 0 <= size < 2**63 else None
        elif key == "weight_map":
            weight_map = {}
            for name in cursor.keys("weight_map"):
                if not name or "\0" in name:
                    raise FormatError(f"{path}: weight_map: {quoted(name)} cannot be a tensor name")
                weight_map[name] = _checked_name(path, cursor.string(f"weight_map[{quoted(name)}]"))
        else:
            cursor.value(quoted(key))
    cursor.finish(" \t\r\n")
    if weight_map is None:
        raise FormatError(
            f"{path}: has no 'weight_map', so it is no index of weights; name the model's folder instead"
        )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise FormatError(f"{path}: names more than {MAX_SHARDS} files")
    return total, weight_map


def _checked_name(path: Path, name: str) -> str:
    """A file name from the index, which must stay inside the folder on any system."""
    if any(character in name for character in "\\:\0") or any(
        part in ("", ".", "..") for part in name.split("/")
    ):
        raise FormatError(
            f"{path}: weight_map names the file {quoted(name)}, which is not a plain name inside the folder"
        )
    return name


def _stray(folder: Path, known: set[str]) -> list[str]:
    weights = (".safetensors", INDEX_SUFFIX)
    return [path.name for path in _listed(folder) if path.name not in known and path.name.endswith(weights)]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise OazooError(f"{folder}: cannot be read: {error.strerror}") from error


def _check_present(path: Path, names: list[str], weight_map: dict[str, str], stray: list[str]) -> None:
    absent = [name for name in names if not (path.parent / name).is_file()]
    if not absent:
        return
    held = Counter(weight_map.values())
    counts = [f"{quoted(name)} ({held[name]} tensors)" for name in absent]
    message = f"{path}: {len(absent)} of {len(names)} files that it names are not there: {some(counts)}"
    if stray:
        message += f"; there, but not named by it: {some(stray)}: the index seems to be of another export"
    raise FormatError(f"{message}; fetch the model again")
