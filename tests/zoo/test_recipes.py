"""Budgets: the choice against exhaustive search, sensitivities against the float64 reference model, and the files made."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import reference_models
from click.testing import CliRunner, Result
from model_goldens import source_path

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError
from oazoo.formats import quant
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.safetensors_writer import write_safetensors
from oazoo.zoo.calibrate import calibrate
from oazoo.zoo.quantize import quantize
from oazoo.zoo.receipt import read_receipt
from oazoo.zoo.recipes import RECIPES, Budget, Option, choose, short_names
from oazoo.zoo.sensitivity import CONTEXT, SEQUENCES, measure, spread, usual
from oazoo.zoo.statistics import load_statistics, save_statistics

TEXT = "A ferry came in at noon, and the men who mended nets looked up from their work for a while. " * 4


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def bits(path: Path) -> float:
    with OamSource(path) as source:
        tensors = list(source.values())
        return 8 * sum(t.info.nbytes for t in tensors) / sum(t.info.numel for t in tensors)


# -------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_the_best_there_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = {}
    for name in "abcdefg":
        size, loss = int(rng.integers(1, 50)) * 100, float(rng.random())
        options[name] = [
            Option("q4", 5 * size, loss),
            Option("q8", 9 * size, loss / 200),
            Option("dense", 32 * size, 0.0),
        ]
    least = sum(some[0].nbytes for some in options.values())
    for share in (0.0, 0.05, 0.3, 1.0, 9.0):
        limit = int(least * (1 + share))
        found = choose(options, limit)
        picked = [next(o for o in options[name] if o.encoding == found[name]) for name in options]
        assert sum(o.nbytes for o in picked) <= limit
        best = min(
            sum(o.loss for o in some)
            for some in itertools.product(*options.values())
            if sum(o.nbytes for o in some) <= limit
        )
        assert sum(o.loss for o in picked) <= best * 1.001 + 1e-12
    with pytest.raises(UsageError, match="smallest choice"):
        choose(options, least - 1)


def test_budgets_are_read() -> None:
    assert Budget.parse("5.5bpw").bits_per_weight == 5.5
    assert Budget.parse("92MB").file_bytes == 92_000_000
    assert Budget.parse("1.5 GiB").file_bytes == 3 << 29
    for text in ("", "5.5", "bpw", "-3bpw", "0MB", "9e3MB", "5,5bpw", "92 M"):
        with pytest.raises(UsageError, match="write bits a weight"):
            Budget.parse(text)


def test_names_are_drawn_together() -> None:
    names = [f"layers.{i}.attn.v.weight" for i in (0, 1, 2, 5, 7, 8)] + [
        "embed.weight",
        "layers.3.mlp.up.weight",
    ]
    assert short_names(names) == [
        "embed.weight",
        "layers.{0-2,5,7-8}.attn.v.weight",
        "layers.3.mlp.up.weight",
    ]


# -------------------------------------------------------------------------------------------------------- measuring


def test_sensitivities_are_those_of_the_reference(dense: Path, tmp_path: Path) -> None:
    """Every tensor alone is quantised in the float64 reference model, and the divergence of its logits computed."""
    packed = tmp_path / "packed.oam"
    quantize(dense, packed, "q4", method="search")
    found = measure(dense, packed, TEXT)
    weights, config = reference_models.load_oam(dense)
    model = oazoo.load(dense)
    ids = np.asarray(model.tokenizer.encode(TEXT, allow_special=False), np.int32)
    sequences = spread(ids, min(CONTEXT, config.max_positions), SEQUENCES)
    assert found.tokens == sum(s.size for s in sequences)

    def log_probabilities(values: dict[str, npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
        result = []
        for sequence in sequences:
            x = reference_models.logits(values, config, sequence)[sequence.size // 2 : -1]
            x = x - x.max(1, keepdims=True)
            result.append(x - np.log(np.exp(x).sum(1, keepdims=True)))
        return result

    def divergence(changed: dict[str, npt.NDArray[np.float64]]) -> float:
        pairs = zip(before, log_probabilities({**weights, **changed}), strict=True)
        return float(np.concatenate([(np.exp(a) * (a - b)).sum(1) for a, b in pairs]).mean())

    before = log_probabilities(weights)
    with OamSource(packed) as source:
        decoded = {
            name: quant.decode(t.raw(), "q4", t.info.numel).reshape(t.info.shape).astype(np.float64)
            for name, t in source.items()
            if t.info.encoding == "q4"
        }
    assert found.losses.keys() == decoded.keys()
    alone = {name: divergence({name: values}) for name, values in decoded.items()}
    for name in ("embed.weight", "head.weight"):  # measured as they are
        if name in alone:
            assert found.losses[name] == pytest.approx(alone[name], rel=1e-3)
    layers: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    for name, values in decoded.items():
        if name.startswith("layers."):
            layers.setdefault(name.split(".")[1], {})[name] = values
    for some in layers.values():  # few layers, so that each is measured as a whole
        assert sum(found.losses[name] for name in some) == pytest.approx(divergence(some), rel=1e-3)
    names = [name for some in layers.values() for name in some]
    ranks = [np.argsort(np.argsort([table[n] for n in names])) for table in (found.losses, alone)]
    assert np.corrcoef(ranks)[0, 1] > 0.85
    logs = [np.log([table[n] for n in names]) for table in (found.losses, alone)]
    assert np.abs(np.subtract(*logs)).max() < np.log(4)


def test_texts_that_are_too_short(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 32"):
        quantize(dense, tmp_path / "x.oam", budget="6bpw", method="search", text="A ferry came in at noon.")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------- spending


def test_a_budget_is_kept_and_written_down(dense: Path, tmp_path: Path) -> None:
    stats, out = tmp_path / "s.safetensors", tmp_path / "o.oam"
    save_statistics(calibrate(dense, TEXT), stats)
    done = run("quantize", dense, "-o", out, "--budget", "6.2bpw", "--stats", stats, "--text", "-")
    assert done.exit_code == 2 and "either statistics or a text" in done.output
    done = run("quantize", dense, "-o", out, "--budget", "6.2bpw", "--stats", stats)
    assert done.exit_code == 0, done.output
    assert "kept because" in done.stdout  # the table comes before the work
    assert 5.6 < bits(out) <= 6.2
    known = load_statistics(stats).sensitivities["weighted"]
    with OamSource(out) as source:
        source.verify()
        note = source.metadata["quantization"]
        kinds = {name: t.info.encoding for name, t in source.items()}
        first = source.weights_checksum
    assert (
        note["budget"] == "6.2bpw"
        and note["method"] == "weighted"
        and note["sensitivity"]["tokens"] == known.tokens
    )
    assert note["chosen"]["q8"] == short_names([n for n, kind in kinds.items() if kind == "q8"])
    # What stays at 4 bits could not be exchanged for something smaller that costs more.
    gain = {n: known.losses[n] for n in known.losses}
    with OamSource(dense) as source:
        size = {n: source[n].info.numel for n in gain}
    assert not any(
        gain[a] > gain[b] * 1.02 and size[a] <= size[b]
        for a in gain
        for b in gain
        if kinds[a] == "q4" and kinds[b] == "q8"
    )
    shown = run("inspect", out)
    assert "budget: 6.2bpw" in shown.stdout and note["chosen"]["q8"][0] in shown.stdout
    # The statistics know the costs now; the result is the same.
    again = run("quantize", dense, "-o", out, "--budget", "6.2bpw", "--stats", stats, "--force", "--json")
    assert again.exit_code == 0 and json.loads(again.stdout)["budget"] == "6.2bpw"
    assert "was added to it" not in again.stderr
    with OamSource(out) as source:
        assert source.weights_checksum == first
    assert np.isfinite(oazoo.load(out).logits([1, 2, 3])).all()


def test_a_receipt_says_how_a_mix_was_made(dense: Path, tmp_path: Path) -> None:
    stats, out, text = tmp_path / "s.safetensors", tmp_path / "o.oam", tmp_path / "t.txt"
    text.write_text(TEXT * 2)
    calibrated = calibrate(dense, TEXT)
    save_statistics(calibrated, stats)
    base = ["quantize", dense, "-o", out, "--recipe", "q4-high", "--stats", stats, "--eval-text", text]
    base += ["--eval-context", 32]
    stopped = run(*base, "--max-kl", "1e-9")
    assert stopped.exit_code == 1 and not out.exists()
    done = run(*base, "--max-kl", "9", "--max-ppl-ratio", "9")
    assert done.exit_code == 0, done.output
    with OamSource(out) as source:
        receipt = read_receipt(source)
    assert receipt is not None and receipt["matches"] is True and 0 < receipt["kl_mean"] < 9
    made = receipt["made"]
    assert (made["recipe"], made["budget"], made["method"]) == ("q4-high", "6.17bpw", "weighted")
    assert made["statistics"]["text_sha256"] == calibrated.text_sha256
    assert made["sensitivity"]["measured"] is True
    assert calibrated.text_sha256 in run("inspect", out).stdout


def test_sizes_of_files_patterns_and_what_is_too_small(dense: Path, tmp_path: Path) -> None:
    stats = tmp_path / "s.safetensors"
    save_statistics(calibrate(dense, TEXT, covariance=True), stats)
    small = quantize(dense, None, "q4", dry_run=True, method="search", keep=["embed.weight"]).output_bytes
    limit = small + 60_000
    report = quantize(
        dense, tmp_path / "o.oam", budget=f"{limit / 1000}kB", statistics=stats, keep=["embed.weight"]
    )
    assert report.method == "gptq"  # for there are covariances
    assert small < report.output_bytes == (tmp_path / "o.oam").stat().st_size <= limit
    with OamSource(tmp_path / "o.oam") as source:
        assert source["embed.weight"].info.encoding == "f32"  # patterns are stronger
    with pytest.raises(UsageError, match="too small"):
        quantize(dense, None, budget="4.9bpw", dry_run=True)
    assert "embed.weight" not in load_statistics(stats).sensitivities["gptq"].losses
    planned = quantize(dense, None, recipe="q4-high", dry_run=True, statistics=stats)
    assert "embed.weight" in load_statistics(stats).sensitivities["gptq"].losses
    assert planned.recipe == "q4-high" and planned.budget == "6.17bpw"
    mixed = quantize(dense, tmp_path / "g.oam", budget="6.2bpw", statistics=stats)
    assert mixed.method == "gptq" and bits(tmp_path / "g.oam") <= 6.2
    plain = {name: tmp_path / f"{name}.oam" for name in ("q4", "q8")}
    quantize(dense, plain["q4"], "q4", statistics=stats)
    quantize(dense, plain["q8"], "q8")
    kinds = set()
    with OamSource(tmp_path / "g.oam") as source:
        source.verify()
        assert source.metadata["quantization"]["method"] == "gptq"
        # Every tensor is as it is where all are packed: by error feedback to 4 bits, and by plain search to 8.
        for encoding, path in plain.items():
            with OamSource(path) as whole:
                for name, tensor in source.items():
                    if tensor.info.encoding == encoding:
                        kinds.add(encoding)
                        np.testing.assert_array_equal(tensor.raw(), whole[name].raw(), err_msg=name)
    assert kinds == {"q4", "q8"}
    assert np.isfinite(oazoo.load(tmp_path / "g.oam").logits([1, 2, 3])).all()
    for arguments in ({"recipe": "q5"}, {"recipe": "q4", "to": "q4"}, {"budget": "5bpw", "to": "q8"}, {}):
        with pytest.raises(UsageError):
            quantize(dense, None, dry_run=True, **arguments)  # type: ignore[arg-type]


def test_plain_recipes_are_their_targets(dense: Path, tmp_path: Path) -> None:
    for name in ("q4", "q8"):
        assert RECIPES[name].budget is None
        quantize(dense, tmp_path / "a.oam", recipe=name, method="absmax", overwrite=True)
        quantize(dense, tmp_path / "b.oam", name, method="absmax", overwrite=True)
        with OamSource(tmp_path / "a.oam") as a, OamSource(tmp_path / "b.oam") as b:
            assert a.weights_checksum == b.weights_checksum


def test_the_default_is_weighted_and_says_so(dense: Path, tmp_path: Path) -> None:
    one, two, text = tmp_path / "one.oam", tmp_path / "two.oam", tmp_path / "t.txt"
    text.write_text(TEXT)
    done = run("quantize", dense, "-o", one, "--to", "q4", "--text", text)
    assert done.exit_code == 0, done.output
    assert "method weighted: the model is run over a text first" in done.stderr
    quantize(dense, two, "q4", method="weighted", text=TEXT)
    with OamSource(one) as a, OamSource(two) as b:
        assert a.weights_checksum == b.weights_checksum
        assert a.metadata["quantization"]["method"] == "weighted"
    assert quantize(dense, None, "q8", dry_run=True).method == "search"


def test_models_that_cannot_run_are_guessed(dense: Path, tmp_path: Path) -> None:
    raw, out = tmp_path / "raw.oam", tmp_path / "out.oam"
    oazoo.convert(source_path("F32"), raw, arch="raw")
    told: list[str] = []
    report = quantize(raw, out, budget="5.8bpw", notify=told.append)
    assert report.method == "absmax" and any("cannot run" in line for line in told)
    assert bits(out) <= 5.8
    with OamSource(out) as source:
        assert source.metadata["quantization"]["sensitivity"] == {"measured": False}
        encodings = {name: t.info.encoding for name, t in source.items()}
    values = [kind for name, kind in encodings.items() if "attn_v" in name or "v_proj" in name]
    assert values and set(values) == {"q8"}
    with OamSource(raw) as source:
        guessed = usual(source, [n for n, kind in encodings.items() if kind in ("q4", "q8")])
    assert sum(guessed.losses.values()) == pytest.approx(1)


# ------------------------------------------------------------------------------------- sources that are quantised already


def encodings_of(path: Path) -> dict[str, str]:
    with OamSource(path) as source:
        source.verify()
        return {name: t.info.encoding for name, t in source.items()}


@pytest.mark.parametrize("to", ["f16", "bf16", "f32"])
def test_unpacking(dense: Path, tmp_path: Path, to: str) -> None:
    packed, out = tmp_path / "packed.oam", tmp_path / "out.oam"
    quantize(dense, packed, "q4", q8=["embed*"], method="absmax")
    done = run("quantize", packed, "-o", out, "--to", to)
    assert done.exit_code == 0, done.output
    kinds = encodings_of(packed)
    with OamSource(packed) as before, OamSource(out) as after:
        for name, kind in kinds.items():
            wanted = before[name].numpy()
            if kind in ("q4", "q8"):
                assert after[name].info.encoding == to
                wanted = wanted.astype({"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}[to])
            assert np.array_equal(after[name].numpy().view(np.uint8), wanted.view(np.uint8)), name
        note = after.metadata["quantization"]
        assert note["to"] == to and note["unpacked_from"].keys() == {"q4", "q8"}
        assert note["before"]["method"] == "absmax"  # what was lost before is still told
    again = run("quantize", out, "-o", tmp_path / "x.oam", "--to", to)
    assert again.exit_code == 2 and "nothing" in again.output and "to unpack" in again.output
    for more in (["--method", "search"], ["--q8", "embed*"], ["--allow-requantize"], ["--budget", "6bpw"]):
        assert run("quantize", packed, "-o", tmp_path / "x.oam", "--to", to, *more).exit_code == 2


def test_what_a_type_cannot_hold_is_not_unpacked_to_it(tmp_path: Path) -> None:
    big, packed, out = (tmp_path / f"{n}.oam" for n in ("big", "packed", "out"))
    with OamWriter(big, config=OamConfig("test"), entries=[OamEntry("w", (2, 32), "f32")]) as writer:
        writer.write("w", np.full((2, 32), 1e6, np.float32))
    quantize(big, packed, "q8", method="absmax")
    with pytest.raises(FormatError, match="'w' holds values that are not finite, or too large for f16"):
        quantize(packed, out, "f16")
    assert not out.exists()
    quantize(packed, out, "bf16")
    quantize(packed, out, "f16", allow_nonfinite=True, overwrite=True)
    with OamSource(out) as source:
        assert np.isinf(source["w"].numpy()).all()


def test_packing_again_must_be_allowed_and_is_told(dense: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.oam", tmp_path / "twice.oam"
    quantize(dense, once, "q8", method="absmax")
    refused = run("quantize", once, "-o", twice, "--to", "q4", "--method", "absmax")
    assert refused.exit_code == 2 and "quantised already" in refused.output
    assert "--allow-requantize" in refused.output and not twice.exists()
    done = run("quantize", once, "-o", twice, "--to", "q4", "--method", "absmax", "--allow-requantize")
    assert done.exit_code == 0, done.output
    count = sum(kind == "q8" for kind in encodings_of(once).values())
    assert f"quantised AGAIN, on top of what they had lost before: {count} tensors" in done.stderr
    with OamSource(once) as before, OamSource(twice) as after:
        assert after.metadata["quantization"]["requantized_from"] == {"q8": count}
        assert after.metadata["quantization"]["before"]["to"] == "q8"
        for name, tensor in after.items():
            if tensor.info.encoding == "q4":  # the format's own encoder on what Q8 decodes to
                codes, scales = quant.encode(before[name].numpy(), "q4")
                assert np.array_equal(tensor.raw(), np.concatenate([codes, scales.view(np.uint8)])), name
    # Q4 cannot become better: refused with or without being allowed to.
    for more in ([], ["--allow-requantize"]):
        done = run("quantize", twice, "-o", tmp_path / "x.oam", "--to", "q8", "--method", "absmax", *more)
        assert done.exit_code == 2 and "could only lose more" in done.output


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"losses": {"a": -1.0}, "text": "t", "text_sha256": "", "tokens": 3}, "nothing can cost"),
        ({"losses": {"a": "1"}, "text": "t", "text_sha256": "", "tokens": 3}, "nothing can cost"),
        ({"losses": {}, "text": "t", "text_sha256": ""}, "lack one of"),
        ([], "lack one of"),
    ],
)
def test_costs_that_cannot_be(entry: object, why: str, tmp_path: Path) -> None:
    facts = {"model": "m", "weights": "", "text": "t", "text_sha256": "", "tokens": 3, "shares": {}}
    metadata = {
        "format": "oazoo.statistics",
        "version": "1",
        "statistics": json.dumps({**facts, "sensitivities": {"weighted": entry}}),
    }
    path = tmp_path / "s.safetensors"
    write_safetensors(path, {"moments.a": np.ones(4, np.float32)}, metadata=metadata)
    with pytest.raises(FormatError, match=why):
        load_statistics(path)
