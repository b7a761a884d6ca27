"""`oazoo eval`: perplexity and divergence against float64 by their definitions, and texts that cannot be evaluated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from model_goldens import source_path
from reference_models import load_oam
from reference_models import logits as numpy_logits

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, TokenizerError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.generation.text_model import TextModel
from oazoo.models import session
from oazoo.text import Tokenizer
from oazoo.zoo import evaluate as module
from oazoo.zoo.evaluate import Comparison, evaluate, evaluate_all

TEXT = "The harbour was quiet when the ferry came in. Two men — one old — mended a net; a dog slept. " * 6
F64 = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model with a tokenizer: dense, and packed to 8 and 4 bits."""
    folder = tmp_path_factory.mktemp("eval")
    paths = {name: folder / f"{name}.oam" for name in ("f32", "q8", "q4")}
    oazoo.convert(source_path("F32"), paths["f32"])
    for to in ("q8", "q4"):
        oazoo.quantize(paths["f32"], paths[to], to, method="absmax")
    return paths


def log_probabilities(path: Path, windows: npt.NDArray[np.integer[Any]]) -> F64:
    """Float64 log-probabilities [windows, context, vocabulary] of every next token."""
    params, config = load_oam(path)
    x = np.stack([numpy_logits(params, config, ids) for ids in windows]).astype(np.float64)
    x -= x.max(-1, keepdims=True)
    result: F64 = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result


def cut(ids: list[int], context: int) -> npt.NDArray[np.int64]:
    count = len(ids) // context
    return np.array(ids[: count * context]).reshape(count, context)


def scored(log_p: F64, windows: npt.NDArray[np.integer[Any]]) -> tuple[F64, F64]:
    """Rows that predict the second half of each window but its first token, and what they give to the tokens there."""
    context = windows.shape[1]
    rows = log_p[:, context // 2 : context - 1]
    targets = windows[:, context // 2 + 1 :]
    nll = -np.take_along_axis(rows, targets[:, :, None], 2)[:, :, 0]
    return rows.reshape(-1, rows.shape[-1]), nll.reshape(-1)


@pytest.mark.parametrize("context", [32, 33, 4, 100])
def test_perplexity_by_its_definition(
    files: dict[str, Path], context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CHUNK", 13)  # windows in several chunks
    monkeypatch.setattr(module, "_LOGIT_BYTES", 320 * 4 * 5)  # logits five rows at a time
    seen: list[tuple[int, int | None, str]] = []
    model = oazoo.load(files["f32"])
    found = evaluate(
        model, TEXT, context=context, progress=lambda label, done, of, unit: seen.append((done, of, unit))
    )
    ids = model.tokenizer.encode(TEXT, allow_special=False)
    windows = cut(ids, context)
    _, nll = scored(log_probabilities(files["f32"], windows), windows)
    assert found.tokens == nll.size == len(windows) * (context - context // 2 - 1)
    assert found.nll == pytest.approx(nll.mean(), abs=2e-6)
    assert found.perplexity == pytest.approx(math.exp(nll.mean()), rel=2e-6)
    error = math.exp(nll.mean()) * nll.std() / math.sqrt(nll.size - 1)
    assert found.perplexity_error == pytest.approx(error, rel=1e-4)
    assert found.bits_per_byte == pytest.approx(
        nll.mean() / math.log(2) * len(ids) / len(TEXT.encode()), rel=1e-5
    )
    assert found.windows == len(windows) and found.comparison is None and found.text_tokens == len(ids)
    assert seen == [(n, len(windows), "windows") for n in range(len(windows) + 1)]
    assert evaluate(model, TEXT, context=context, windows=1).tokens == context - context // 2 - 1


@pytest.mark.parametrize("packed", ["q8", "q4"])
def test_divergence_by_its_definition(files: dict[str, Path], packed: str) -> None:
    context = 64
    found = evaluate(files[packed], TEXT, against=files["f32"], context=context)
    windows = cut(oazoo.load(files["f32"]).tokenizer.encode(TEXT, allow_special=False), context)
    p, p_nll = scored(log_probabilities(files["f32"], windows), windows)
    q, q_nll = scored(log_probabilities(files[packed], windows), windows)
    kl = (np.exp(p) * (p - q)).sum(1)
    other = found.comparison
    assert other is not None and other.against == "f32" and found.model == packed
    assert other.kl_mean == pytest.approx(kl.mean(), rel=2e-3)
    assert other.kl_999 == pytest.approx(np.quantile(kl, 0.999), rel=2e-3)
    assert other.kl_max == pytest.approx(kl.max(), rel=2e-3)
    assert other.kl_mean_error == pytest.approx(kl.std() / math.sqrt(kl.size - 1), rel=1e-2)
    assert abs(other.same_top - (p.argmax(1) == q.argmax(1)).mean()) <= 1 / kl.size  # one near tie
    assert other.perplexity == pytest.approx(math.exp(p_nll.mean()), rel=2e-6)
    assert found.perplexity == pytest.approx(math.exp(q_nll.mean()), rel=2e-6)
    assert other.perplexity_ratio == pytest.approx(math.exp((q_nll - p_nll).mean()), rel=2e-6)
    paired = (q_nll - p_nll).std() / math.sqrt(kl.size - 1)
    assert other.perplexity_ratio_error == pytest.approx(paired * other.perplexity_ratio, rel=1e-2)


def test_a_model_is_not_far_from_itself(files: dict[str, Path]) -> None:
    model = oazoo.load(files["f32"])
    both = evaluate_all([model, files["q4"]], TEXT, against=model, context=32)
    same, other = (e.comparison for e in both)
    assert isinstance(same, Comparison) and isinstance(other, Comparison)
    assert (same.kl_mean, same.kl_max, same.perplexity_ratio, same.same_top) == (0, 0, 1, 1)
    assert other.kl_mean > 1e-7 and other.perplexity == same.perplexity
    assert other == evaluate(files["q4"], TEXT, against=model, context=32).comparison


def test_windows_begin_with_the_beginning_token_if_the_tokenizer_adds_one(files: dict[str, Path]) -> None:
    plain = oazoo.load(files["f32"])
    with OamSource(files["f32"]) as source:
        definition = source.asset("asset/tokenizer.json")
    assert definition is not None
    adding = TextModel(plain.model, Tokenizer(definition, bos_id=7, add_bos=True))
    ids = adding.tokenizer.encode(TEXT, allow_special=False)
    assert ids[0] == 7
    windows = cut(ids, 16)
    windows[:, 0] = 7
    _, nll = scored(log_probabilities(files["f32"], windows), windows)
    assert evaluate(adding, TEXT, context=16).nll == pytest.approx(nll.mean(), abs=2e-6)
    with pytest.raises(FormatError, match="cannot be compared, because their tokenizers differ"):
        evaluate(adding, TEXT, against=plain, context=16)


def test_models_of_differing_tokenizers_are_not_compared(files: dict[str, Path], tmp_path: Path) -> None:
    with OamSource(files["f32"]) as source:
        definition = source.asset("asset/tokenizer.json")
    assert definition is not None
    content = json.loads(definition)
    vocabulary = content["model"]["vocab"]
    rare = [t for t, i in sorted(vocabulary.items(), key=lambda item: item[1]) if i < 256 and t not in TEXT][
        :2
    ]
    vocabulary[rare[0]], vocabulary[rare[1]] = vocabulary[rare[1]], vocabulary[rare[0]]
    plain = oazoo.load(files["f32"])
    swapped = TextModel(plain.model, Tokenizer(json.dumps(content).encode()))
    with pytest.raises(FormatError, match=r"token \d+ is '.+' and '.+'"):
        evaluate(swapped, TEXT, against=plain, context=16)
    path = tmp_path / "llama.oam"
    oazoo.convert(source_path("llama"), path)
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        evaluate(path, TEXT)
    other = TextModel(oazoo.load(path).model, plain.tokenizer)
    with pytest.raises(FormatError, match="vocabularies of 320 and 160 tokens"):
        evaluate(other, TEXT, against=plain, context=16)


def test_logits_that_are_not_finite_are_an_error(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "broken.oam"
    with OamSource(files["f32"]) as source:
        entries = [OamEntry(n, t.info.shape, t.info.encoding) for n, t in source.items()]
        assets = {n.removeprefix("asset/"): t.raw().tobytes() for n, t in source.state.items()}
        with OamWriter(path, config=source.config, entries=entries, assets=assets) as writer:
            for name, tensor in source.items():
                values = np.array(tensor.numpy())
                if name == "norm.weight":
                    values[3] = np.nan
                writer.write(name, values)
    with pytest.raises(FormatError, match="broken: the logits of window 1 have values that are not finite"):
        evaluate(path, TEXT, context=16)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", {}, "is empty"),
        (" \n\t", {}, "is empty"),
        ("a\0b" * 100, {}, "NUL at character 1: that is a binary file"),
        (
            "Too short.",
            {"context": 64},
            "less than one window of 64: give a longer text, or a smaller --context",
        ),
        (TEXT, {"context": 3}, "at least 4"),
        (TEXT, {"context": 257}, "f32 can have at most 256"),
        (TEXT, {"windows": 0}, "0 windows: at least 1"),
    ],
)
def test_what_cannot_be_evaluated(
    files: dict[str, Path], text: str, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(files["f32"], text, **arguments)  # type: ignore[arg-type]


def test_the_command(files: dict[str, Path], tmp_path: Path) -> None:
    runner = CliRunner()
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    arguments = ["eval", str(files["q4"]), "--against", str(files["f32"]), "--context", "32"]
    done = runner.invoke(main, [*arguments, "--text", str(text), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    found = evaluate(files["q4"], TEXT, against=files["f32"], context=32).to_json()
    assert {**told, "seconds": 0} == {**found, "seconds": 0}
    piped = runner.invoke(main, [*arguments, "--text", "-"], input=TEXT)
    assert piped.exit_code == 0 and "mean KL" in piped.stdout and "tokens/s" in piped.stderr
    assert f"{found['perplexity']:.4f} ±" in piped.stdout and "\x1b" not in piped.output
    # Limits: passed and exceeded.
    kl = found["comparison"]["kl_mean"]
    assert runner.invoke(main, [*arguments, "--text", str(text), "--max-kl", str(kl * 1.01)]).exit_code == 0
    over = runner.invoke(main, [*arguments, "--text", str(text), "--max-kl", str(kl * 0.99)])
    assert over.exit_code == 1 and "allowed (--max-kl)" in over.stderr and "mean KL" in over.stdout
    over = runner.invoke(main, [*arguments, "--text", str(text), "--max-ppl-ratio", "0.5"])
    assert over.exit_code == 1 and "allowed (--max-ppl-ratio)" in over.stderr


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 2, "is empty"),
        (b"\xff\xfe\x00binary", 2, "is not UTF-8 text: byte 0 is 0xff"),
        (bytes(4096), 2, "that is a binary file"),
        (b"\xf0\x9f", 2, "is not UTF-8 text"),
        (b"short", 2, "less than one window"),
    ],
)
def test_hostile_texts_end_with_a_message(
    files: dict[str, Path], tmp_path: Path, content: bytes, status: int, message: str
) -> None:
    text = tmp_path / "text.bin"
    text.write_bytes(content)
    done = CliRunner().invoke(main, ["eval", str(files["f32"]), "--context", "64", "--text", str(text)])
    assert done.exit_code == status and message in done.stderr and "fault in oazoo" not in done.stderr


def test_misuse_is_told_before_anything_is_loaded(files: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    base = ["eval", str(files["q4"]), "--text"]
    for arguments, message in (
        ([*base, str(tmp_path / "none")], "no such file"),
        ([*base, str(text), "--receipt"], "name it with --against"),
        ([*base, str(text), "--max-kl", "1"], "name it with --against"),
        (
            [*base, str(text), "--against", str(files["f32"]), "--max-kl", "-1"],
            "a limit is a number from 0 on",
        ),
        ([*base, str(text), "--against", str(files["f32"]), "--max-kl", "nan"], "a limit is a number"),
        (["eval", str(tmp_path / "no.oam"), "--text", str(text)], "no such file or folder"),
    ):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2 and message in done.stderr, (arguments, done.stderr)


def test_figures_beyond_float64_are_null_in_json() -> None:
    made = Comparison("a", 1.0, math.inf, math.nan, 1.0, 0.0, 1.0, 1.0, 1.0)
    whole = module.Evaluation("m", math.inf, math.inf, 800.0, 1.0, 5, 9, 1, 9, "", "", 1.0, made).to_json()
    assert whole["perplexity"] is None and whole["nll"] == 800.0
    assert whole["comparison"]["perplexity_ratio"] is None and whole["comparison"]["kl_mean"] == 1.0
    json.dumps(whole, allow_nan=False)
