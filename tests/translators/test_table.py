"""The tables in docs/translation.md: every cell is done, and is as the page says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from checkpoints import llama_folder
from exported import gguf_values, oam_bytes, oam_values
from model_goldens import reference, source_path
from reference_models import load_oam, logits
from table_models import REFUSED, ROWS, Row, bare_graph, gguf_of
from torch_files import save_tensors

import oazoo
from oazoo.configs import DecoderConfig
from oazoo.errors import OazooError
from oazoo.formats.oam import OamSource
from oazoo.translators import convert, translators
from oazoo.translators.export import export
from oazoo.translators.exporter import config_differences
from oazoo.translators.pretokenizers import PRE_TOKENIZERS
from oazoo.zoo.verify import verify

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "translation.md").read_text("utf-8")
#: Container → what an export to it is called.
OUTPUTS = {"SafeTensors": "out", "GGUF": "out.gguf", "ONNX": "out.onnx"}
NEVER = "—"


def tables() -> list[list[dict[str, str]]]:
    """Every table of the page: its rows, by the words over the columns."""
    found: list[list[dict[str, str]]] = []
    head: list[str] = []
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line[:1] == "|" else []
        if not cells:
            head = []
        elif not head:
            head = cells
            found.append([])
        elif set(line) - set("|- "):
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


TABLE, ALWAYS, OTHERS = tables()
DOCUMENTED = {row["model"]: row for row in TABLE}
MESSAGES = dict(re.findall(r"^(\d+)\. `(.+?)`$", TEXT, re.M))


def matches(written: str, message: str) -> bool:
    """Whether a message is the one on the page, where … stands for anything, and a line break for a space."""
    parts = [re.escape(part) for part in written.split("…")]
    return re.fullmatch(".*".join(parts), " ".join(message.split())) is not None


def agrees(cell: str, outcome: str) -> bool:
    if cell.startswith("no ("):
        return outcome != "yes" and matches(MESSAGES[cell[4:-1]], outcome)
    return cell == outcome


def attempt(action: Callable[[], object]) -> str:
    """``yes``, or why not."""
    try:
        action()
    except OazooError as error:
        return str(error)
    return "yes"


def check_answers(path: Path, golden: str | None) -> None:
    """The logits of a converted golden are those that PyTorch found."""
    if golden is None:
        return
    ids, wanted = reference(golden)
    params, config = load_oam(path)
    assert np.abs(logits(params, config, ids[0]) - wanted[0]).max() < (
        2e-2 if golden == "llama_tied_bf16" else 5e-5
    )


def check_same(first: Path, again: Path) -> None:
    """The same model: config, and every value that it computes with."""
    with OamSource(first) as a, OamSource(again) as b:
        assert sorted(a) == sorted(b)
        families = a.metadata["family"], b.metadata["family"]
    assert families[0] == families[1]
    one, other = load_oam(first)[1], load_oam(again)[1]
    offsets = [c.norm_offset if isinstance(c, DecoderConfig) else 0.0 for c in (one, other)]
    assert {name for name, _, _ in config_differences(one, other)} <= (
        {"norm_offset"} if len(set(offsets)) == 2 else set()
    )
    before, after = oam_values(first), oam_values(again)
    for name, value in before.items():
        if value.ndim == 1 and offsets[0] != offsets[1]:  # Gemma's norms: the sum is what is computed with
            x, y = value.astype(np.float32), after[name].astype(np.float32)
            assert np.array_equal(x + np.float32(offsets[0]), y + np.float32(offsets[1])), name
        else:
            assert np.array_equal(value, after[name]), name


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def without_metadata(path: Path, out: Path) -> Path:
    """A graph of ours as another program would have written it: nothing says whose it is."""
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, out)
    return out


def outcomes(row: Row, folder: Path) -> Iterator[tuple[str, str]]:
    """What happens in each cell of a row: (column, ``yes`` or the message)."""
    source, first = row.make(folder / "in"), folder / "first.oam"
    own = "SafeTensors" if source.is_dir() else {".gguf": "GGUF", ".pt": "torch"}[source.suffix]
    convert(source, first)
    check_answers(first, row.golden)
    for container, name in OUTPUTS.items():
        again = folder / f"{name}.oam"
        out = attempt(lambda name=name: export(first, folder / name))
        yield f"{container} out", out
        if out == "yes":
            back = attempt(lambda name=name, again=again: convert(folder / name, again))
            if back == "yes":
                check_same(first, again)
                check_answers(again, row.golden)
        elif container == "GGUF":
            made = gguf_of(oam_values(first), load_oam(first)[1].family, folder / "made.gguf")
            back = attempt(lambda made=made, again=again: convert(made, again))
        else:
            back = NEVER
        yield f"{container} in", "yes" if container == own else back
    if row.graphs:
        for graph in row.graphs:
            convert(source_path(graph), folder / "graph.oam", overwrite=True)
            check_answers(folder / "graph.oam", graph)
        yield "other ONNX in", "yes"
    else:
        graph = folder / "graph.onnx"
        if (folder / "out.onnx").exists():
            without_metadata(folder / "out.onnx", graph)
        else:
            bare_graph(oam_values(first), graph)
        done = attempt(lambda: convert(graph, folder / "graph.oam"))
        if done == "yes":
            check_answers(folder / "graph.oam", row.golden)
        yield "other ONNX in", done
    if own == "torch":
        yield ".pt in", "yes"
    else:
        made = save_tensors(folder / "pytorch.pt", {k: np.float32(v) for k, v in oam_values(first).items()})
        yield ".pt in", attempt(lambda: convert(made, folder / "torch.oam"))


def raw_outcomes(folder: Path) -> Iterator[tuple[str, str]]:
    """The row of tensors without a model, all of them under the names that they have."""
    source, first = llama_folder(folder / "in"), folder / "first.oam"
    convert(source, first, arch="raw")
    yield "SafeTensors in", "yes"
    values = {name: np.float32(value) for name, value in oam_values(first).items()}
    for container, name in OUTPUTS.items():
        name = "out.safetensors" if container == "SafeTensors" else name
        yield f"{container} out", attempt(lambda name=name: export(first, folder / name))
    made = {
        "SafeTensors": folder / "out.safetensors",
        "GGUF": gguf_of(values, "llama", folder / "in.gguf"),
        "other ONNX": bare_graph(values, folder / "in.onnx"),
        ".pt": save_tensors(folder / "in.pt", dict(values)),
    }
    for container, path in made.items():
        convert(path, folder / "again.oam", arch="raw", overwrite=True)
        again = oam_bytes(folder / "again.oam")
        assert all(again[name] == stored for name, stored in oam_bytes(first).items())
        yield f"{container} in", "yes"
    oazoo.export(_llama_oam(folder), folder / "ours.onnx")
    yield "ONNX in", attempt(lambda: convert(folder / "ours.onnx", folder / "o.oam", arch="raw"))


def _llama_oam(folder: Path) -> Path:
    convert(folder / "in", folder / "llama.oam")
    return folder / "llama.oam"


def test_the_page_has_all_rows() -> None:
    assert list(DOCUMENTED) == [*ROWS, "tensors without a model (`--arch raw`)"]
    assert {row["source"] for row in OTHERS} == set(REFUSED)
    used = {
        cell[4:-1]
        for table in (TABLE, ALWAYS)
        for row in table
        for cell in row.values()
        if cell[:4] == "no ("
    }
    assert used == set(MESSAGES)


#: No language models: docs/flow.md, tests/translators/test_dit.py.
FLOW = {f"{naming}:{name}" for naming in ("torch", "hf") for name in ("DiT", "SiT")}


def test_every_architecture_that_is_read_has_a_row() -> None:
    accepted = {name for entry in translators().values() for name in entry.accepts}
    stated = {f"hf:{name}" for row in TABLE for name in names(row["Hugging Face"])}
    stated |= {f"gguf:{name}" for row in TABLE for name in names(row["GGUF"])}
    assert accepted == stated | {"torch:nanogpt", "onnx:graph", "onnx:oazoo", "raw:any"} | FLOW


def test_the_page_names_every_pre_tokenizer() -> None:
    section = TEXT.partition("## Tokenizers in GGUF")[2].partition("in the order of the code:")[2]
    assert names(section.partition(". Any other")[0]) == list(PRE_TOKENIZERS)


def test_files_of_tests_exist() -> None:
    for row in TABLE:
        for name in names(row["more tests"]):
            folder = ROOT / "tests" if "/" in name else ROOT / "tests" / "translators"
            assert (folder / name).is_file(), name


@pytest.mark.parametrize("model", ROWS)
def test_every_cell(model: str, tmp_path: Path) -> None:
    row, found = DOCUMENTED[model], dict(outcomes(ROWS[model], tmp_path))
    for column, outcome in found.items():
        if row[column] == NEVER:  # there is no such file, because the container cannot say what the model is
            assert found[column.replace(" in", " out")] != "yes", column
        else:
            assert agrees(row[column], outcome), f"{column}: the page says {row[column]}, found {outcome}"
    assert set(found) == {column for column in row if column.endswith((" in", " out"))}
    if found["SafeTensors out"] == "yes":
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert (written.get("architectures") or [written["ssm_cfg"]["layer"]])[0] in names(
            row["Hugging Face"]
        )
    if found["GGUF out"] == "yes":
        assert gguf_values(tmp_path / "out.gguf")["general.architecture"] in names(row["GGUF"])


def test_tensors_without_a_model(tmp_path: Path) -> None:
    row = DOCUMENTED["tensors without a model (`--arch raw`)"]
    found = dict(raw_outcomes(tmp_path))
    assert set(found) == {column for column in row if column.endswith((" in", " out"))}
    for column, outcome in found.items():
        assert agrees(row[column], outcome), f"{column}: the page says {row[column]}, found {outcome}"


def test_what_holds_for_every_row(tmp_path: Path) -> None:
    (row,) = ALWAYS
    convert(source_path("llama"), tmp_path / "m.oam")
    assert verify(tmp_path / "m.oam").checked_bytes > 0
    found = {
        ".oam out": "yes",
        ".oam in": attempt(lambda: convert(tmp_path / "m.oam", tmp_path / "n.oam")),
        ".pt out": attempt(lambda: export(tmp_path / "m.oam", tmp_path / "out.pt")),
    }
    for column, outcome in found.items():
        assert agrees(row[column], outcome), f"{column}: the page says {row[column]}, found {outcome}"
    assert set(found) == {column for column in row if column.endswith((" in", " out"))}


@pytest.mark.parametrize("source", REFUSED)
def test_what_is_refused_besides(source: str, tmp_path: Path) -> None:
    (row,) = (row for row in OTHERS if row["source"] == source)
    message = attempt(lambda: convert(REFUSED[source](tmp_path / "in"), tmp_path / "m.oam"))
    (written,) = names(row["message"])
    assert message != "yes" and matches(written, message), message
    assert not (tmp_path / "m.oam").exists()
