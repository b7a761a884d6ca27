"""`oazoo convert --check`: right conversions pass, wrong maps are caught, and what cannot be compared says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, bpe_metadata, gguf_names, llama_metadata, llama_tensors, write_gguf, write_hf
from click.testing import CliRunner, Result
from model_goldens import GGUF, HF, NOT_GGUF, ONNX, source_path

import oazoo
from oazoo.cli.main import main
from oazoo.errors import TranslationError, UsageError
from oazoo.translators import translator as registry
from oazoo.translators.rules import Identity, Rule
from oazoo.translators.translator import Checkpoint, Translation
from oazoo.zoo.check import CheckReport


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


def found(report: Any) -> CheckReport:
    assert isinstance(report.check, CheckReport)
    return report.check


@pytest.mark.parametrize("name", [*HF, *GGUF, *ONNX])
def test_goldens_pass(name: str, tmp_path: Path) -> None:
    check = found(oazoo.convert(source_path(name), tmp_path / "m.oam", check=True))
    assert check.compared and check.passed and len(check.prompts) >= 2
    assert all(0 < p.tokens <= 32 and p.same_best == p.tokens for p in check.prompts)
    if name in ("Q4_K_M", "Q6_K"):  # these become f16: what rounding explains is all there is
        assert check.rounding is not None and check.rounding > 1e-3
        assert abs(check.max_difference - check.rounding) < 1e-4
    else:
        assert check.rounding == 0.0 and check.max_difference < 3e-5


@pytest.mark.parametrize("name", [*HF, *GGUF])
def test_what_goes_out_as_gguf_means_the_same(name: str, tmp_path: Path) -> None:
    """The map out and the map in could share a mistake: llama.cpp's reading of the file is a third opinion."""
    oazoo.convert(source_path(name), tmp_path / "m.oam")
    try:
        oazoo.export(tmp_path / "m.oam", tmp_path / "m.gguf")
    except TranslationError as error:
        assert name in NOT_GGUF and re.search(NOT_GGUF[name], str(error))
        return
    check = found(oazoo.convert(tmp_path / "m.gguf", tmp_path / "again.oam", check=True))
    assert check.compared and check.passed and check.max_difference < 3e-5


def test_rounding_is_allowed_for(tmp_path: Path) -> None:
    check = found(oazoo.convert(source_path("llama"), tmp_path / "m.oam", dtype="bf16", check=True))
    assert check.passed and check.rounding is not None and check.rounding > 1e-3
    assert abs(check.max_difference - check.rounding) < 1e-4
    onnx = found(oazoo.convert(source_path(ONNX[0]), tmp_path / "o.oam", dtype="f16", check=True))
    assert onnx.rounding is None and onnx.max_difference > 1e-4


def test_texts_are_prompts_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = bpe_metadata()
    rows = len(tokenizer["tokenizer.ggml.tokens"])
    tensors = gguf_names(llama_tensors(LLAMA | {"vocab_size": rows}))
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(rows) | tokenizer, tensors)
    prompts = [p.prompt for p in found(oazoo.convert(path, tmp_path / "m.oam", check=True)).prompts]
    assert prompts[0] == "The capital of France is" and prompts[-1] == "32 ids" and len(prompts) == 7
    bare = oazoo.convert(path, tmp_path / "n.oam", check=True, with_tokenizer=False)
    assert [p.prompt for p in found(bare).prompts] == ["1 ids", "7 ids", "32 ids"]


# -- wrong maps --------------------------------------------------------------------------------------------------------


def swapped(one: str, other: str) -> Callable[[Rule], Rule]:
    def change(rule: Rule) -> Rule:
        for a, b in ((one, other), (other, one)):
            if a in rule.target:
                return Rule(rule.target.replace(a, b), rule.sources, rule.transform)
        return rule

    return change


def not_permuted(rule: Rule) -> Rule:
    return Rule(rule.target, rule.sources, Identity()) if ".attn.k." in rule.target else rule


WRONG: dict[str, tuple[str, Callable[[Rule], Rule]]] = {
    "keys not permuted": ("F32", not_permuted),
    "gate and up swapped": ("llama", swapped(".mlp.gate.", ".mlp.up.")),
    "layers swapped": ("llama", swapped("layers.0.", "layers.1.")),
    "norms swapped": ("qwen2", swapped(".attn_norm.", ".mlp_norm.")),
    "keys and values swapped": ("F32", swapped(".attn.k.", ".attn.v.")),
    "matrices not transposed": ("gpt2", lambda r: Rule(r.target, r.sources) if ".attn.o." in r.target else r),
}


@pytest.fixture
def mangled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Gives a function that makes every map wrong by a change of its rules, or of its config."""
    known = dict(registry.translators())

    def apply(change: Callable[[Rule], Rule] = lambda rule: rule, **config: Any) -> None:
        def wrong(translate: Callable[[Checkpoint], Translation]) -> Callable[[Checkpoint], Translation]:
            def translated(checkpoint: Checkpoint) -> Translation:
                right = translate(checkpoint)
                changed = replace(right.config, **config) if config else right.config
                return replace(right, config=changed, rules=[change(rule) for rule in right.rules])

            return translated

        bent = {name: replace(entry, translate=wrong(entry.translate)) for name, entry in known.items()}
        monkeypatch.setattr(registry, "_reading", lambda _: None)
        monkeypatch.setattr(registry, "_ours", lambda: bent)
        monkeypatch.setattr(registry, "translators", lambda: bent)

    yield apply


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_maps_are_caught(fault: str, mangled: Callable[..., None], tmp_path: Path) -> None:
    name, change = WRONG[fault]
    mangled(change)
    out = tmp_path / "m.oam"
    done = command(source_path(name), "-o", out, "--check")
    assert done.exit_code == 1, done.output
    assert "check FAILED" in done.stderr and "it is kept" in done.stderr
    assert "largest difference" in done.stdout
    assert out.is_file() and oazoo.load(out).config is not None
    shown = command(source_path(name), "-o", out, "--check", "--force", "--json")
    data = json.loads(shown.stdout)["check"]
    assert shown.exit_code == 1 and data["compared"] and not data["passed"]
    assert data["max_difference"] > data["tolerance"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"rope_theta": 500.0}),
        ("llama", {"norm_eps": 0.1}),
        ("gpt2", {"activation": "gelu", "norm_eps": 0.05}),
        ("qwen2", {"sliding_window": 2}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"embedding_scale": 1.0}),
        ("gemma3_six", {"sliding_rope_theta": 1000000.0}),
        ("gpt_neox", {"parallel_residual": False}),
        ("phi3", {"rotary_dim": 4}),
        ("qwen3", {"attention_scale": 1.0}),
    ],
)
def test_wrong_settings_are_caught(
    name: str, config: dict[str, Any], mangled: Callable[..., None], tmp_path: Path
) -> None:
    mangled(**config)
    assert not found(oazoo.convert(source_path(name), tmp_path / "m.oam", check=True)).passed


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_the_tolerance_can_be_set(tmp_path: Path) -> None:
    out = tmp_path / "m.oam"
    assert command(source_path("Q6_K"), "-o", out, "--check", "--check-tolerance", "1e-5").exit_code == 1
    loose = command(source_path("Q6_K"), "-o", out, "--check", "--check-tolerance", "1", "--force")
    assert (
        loose.exit_code == 0
        and "rounding weights explains" in loose.stderr
        and "check passed" in loose.stderr
    )


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_tolerances_that_mean_nothing(value: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="positive number"):
        oazoo.convert(source_path("llama"), tmp_path / "m.oam", check=True, check_tolerance=value)
    assert not (tmp_path / "m.oam").exists()
    done = command(source_path("llama"), "-o", tmp_path / "m.oam", "--check", "--check-tolerance", value)
    assert done.exit_code == 2


def test_misuse(tmp_path: Path) -> None:
    source = source_path("llama")
    assert command(source, "-o", tmp_path / "m.oam", "--check-tolerance", "1").exit_code == 2
    assert command(source, "--dry-run", "--check").exit_code == 2
    assert not list(tmp_path.iterdir())


def test_tensors_without_a_model(tmp_path: Path) -> None:
    done = command(source_path("llama"), "-o", tmp_path / "m.oam", "--arch", "raw", "--check")
    assert done.exit_code == 0 and "nothing to check: the tensors were kept without a model" in done.stderr
    done = command(
        source_path("llama"), "-o", tmp_path / "m.oam", "--arch", "raw", "--check", "--json", "--force"
    )
    assert json.loads(done.stdout)["check"]["compared"] is False


def test_no_check_unless_asked(tmp_path: Path) -> None:
    report = oazoo.convert(source_path("llama"), tmp_path / "m.oam")
    assert report.check is None and "check" not in report.to_json()


def test_weights_that_are_not_numbers(tmp_path: Path) -> None:
    """NaN on both sides is the same answer; it is no crash, and valid JSON."""
    tensors = llama_tensors(LLAMA)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    folder = write_hf(tmp_path / "hf", LLAMA, tensors)
    done = command(folder, "-o", tmp_path / "m.oam", "--check", "--json")
    data = json.loads(done.stdout)["check"]
    assert data["compared"] and data["passed"] is (done.exit_code == 0)


def test_without_a_device_the_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oazoo.errors import DeviceError
    from oazoo.zoo import load as loading

    def no_device() -> Any:
        raise DeviceError("no Vulkan device")

    monkeypatch.setattr(loading, "get_device", no_device)
    with pytest.raises(
        DeviceError, match=r"m\.oam is converted and kept, but could not be checked: no Vulkan device"
    ):
        oazoo.convert(source_path("llama"), tmp_path / "m.oam", check=True)
    assert (tmp_path / "m.oam").is_file()
