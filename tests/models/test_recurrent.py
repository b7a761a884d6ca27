"""Recurrent language models: OA's numbers, sessions against whole sequences, and everything else that models can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from oa_goldens import Arrays, close, golden, on_device

import oazoo
from oazoo.cli.main import main
from oazoo.configs import RecurrentConfig, TransformerConfig
from oazoo.errors import TranslationError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig, OamOptimizer
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.models import CausalModel, build
from oazoo.runtime import get_device
from oazoo.runtime.ops.loss import cross_entropy
from oazoo.runtime.tape import GradientTape
from oazoo.text import CharacterTokenizer, OaBpeTokenizer
from oazoo.training.lora import LoraSettings
from oazoo.training.section import to_section
from oazoo.zoo.oa_checkpoint import import_oa
from oazoo.zoo.quantize import quantize
from oazoo.zoo.train import finetune, train
from oazoo.zoo.train_settings import TrainSettings

CONFIGS = {
    "bytegru": RecurrentConfig.byte_model("gru"),
    "byternn": RecurrentConfig.byte_model("rnn"),
    "bytetransformer": TransformerConfig.byte_transformer(),
}


def as_oa(path: Path, values: list[Any], step: int = 0) -> Path:
    """A checkpoint as OA writes it, with the state of AdamW."""
    entries = [OamEntry(f"p{i}", np.shape(value), "f32") for i, value in enumerate(values)]
    first = np.linspace(-1e-3, 1e-3, sum(np.size(value) for value in values), dtype=np.float32)
    state = OamOptimizer("AdamW", 1e-2, 0.9, 0.999, 1e-8, 0.01, step, first, first * first)
    with OamWriter(path, config=OamConfig("RustModule"), entries=entries, optimizer=state) as writer:
        for entry, value in zip(entries, values, strict=True):
            writer.write(entry.name, np.asarray(value, np.float32))
    return path


def parameters(arrays: Arrays) -> list[Any]:
    return [
        arrays[f"param_{i}"] for i in range(sum(key[6:].isdecimal() for key in arrays if key[:6] == "param_"))
    ]


@pytest.mark.parametrize("kernels", ["device", "portable"])
@pytest.mark.parametrize("name", CONFIGS)
def test_goldens(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits to 1e-4, loss, and every gradient to 1e-3 of OA's."""
    if kernels == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")
    arrays, config = golden(name)
    model = build(CONFIGS[name], get_device())
    shapes = CONFIGS[name].parameters()
    assert [list(shape) for shape in shapes.values()] == [shape for _, _, shape in config["params"]]
    model.load_state_dict(dict(zip(shapes, parameters(arrays), strict=True)), get_device())
    model.requires_grad_()
    with GradientTape() as tape:
        logits = model.forward(on_device(arrays["tokens"].astype(np.int32)))
        loss = cross_entropy(logits, on_device(arrays["targets"].astype(np.int32)))
    close(logits, arrays["logits"], 1e-4)
    close(loss, arrays["loss"], 1e-5)
    tape.backward(loss)
    found = dict(model.named_parameters())
    for i, own in enumerate(shapes):
        close(found[own].tensor.grad, arrays[f"grad_{i}"], 1e-3)


@pytest.mark.parametrize("name", ["bytegru", "byternn"])
def test_a_checkpoint_of_oa(name: str, tmp_path: Path) -> None:
    """It becomes a file that runs, with OA's logits, and goes on with OA's optimizer."""
    arrays, _ = golden(name)
    theirs, ours = as_oa(tmp_path / "theirs.oam", parameters(arrays), step=5), tmp_path / "ours.oam"
    done = CliRunner().invoke(main, ["convert", str(theirs), "-o", str(ours)])
    assert done.exit_code == 0, done.output
    model = oazoo.load(ours)
    for row in range(2):
        got = model.logits(arrays["tokens"][row].tolist())
        np.testing.assert_allclose(got, arrays["logits"].reshape(2, 16, 256)[row], rtol=1e-4, atol=1e-5)
    with OamSource(ours) as a, OamSource(theirs) as b:
        assert a.optimizer is not None and b.optimizer is not None
        assert a.optimizer.pack_header() == b.optimizer.pack_header()
        assert np.array_equal(a.optimizer.first, b.optimizer.first)
    text = tmp_path / "text.txt"
    text.write_text("The old dog saw the sun. " * 30)
    run = finetune(ours, [text], None, TrainSettings(steps=2, batch_size=2, context=16, compat="oa"))
    assert run.trainer.stepper.optimizer.steps_taken == 5
    run.fit()
    assert to_section(run.trainer.stepper.optimizer).step == 7
    with pytest.raises(UsageError, match="has neither heads nor experts"):
        import_oa(theirs, tmp_path / "no.oam", heads=2)


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_checkpoint_of_oa_with_a_vocabulary(kind: str, tmp_path: Path) -> None:
    text = "the cat sat on the mat, the cat sat"
    tokenizer = CharacterTokenizer.train([text]) if kind == "char" else OaBpeTokenizer.train([text], 280)
    vocabulary = tmp_path / "vocabulary.txt"
    vocabulary.write_bytes(tokenizer.to_bytes())
    config = RecurrentConfig(
        cell="gru", vocab_size=tokenizer.vocab_size, embedding_size=6, hidden_size=10, num_layers=2
    )
    rng = np.random.default_rng(2)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in config.parameters().values()]
    theirs = as_oa(tmp_path / "theirs.oam", values)
    found = import_oa(theirs, tmp_path / "ours.oam", vocabulary=vocabulary)
    assert found == config
    model = oazoo.load(tmp_path / "ours.oam")
    assert model.tokenizer.encode(text) == tokenizer.encode(text)
    assert len(model.generate("the cat", max_tokens=4).token_ids) == 4
    vocabulary.write_bytes(OaBpeTokenizer.train([text], 257).to_bytes())
    with pytest.raises(UsageError, match="has 257 tokens, and the model"):
        import_oa(theirs, tmp_path / "no.oam", vocabulary=vocabulary)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers of 64 units over bytes that has learned a little, as a file."""
    folder = tmp_path_factory.mktemp("deep")
    rng = np.random.default_rng(1)
    config = RecurrentConfig(cell="gru", vocab_size=256, embedding_size=32, hidden_size=64, num_layers=2)
    values = [
        (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for shape in config.parameters().values()
    ]
    import_oa(as_oa(folder / "theirs.oam", values), folder / "deep.oam")
    return folder / "deep.oam"


def test_sessions(deep: Path) -> None:
    """Every way of feeding gives the same; what cannot be undone is gone back before."""
    model = oazoo.load(deep).model
    assert isinstance(model, CausalModel) and model.constant_state
    ids = np.random.default_rng(3).integers(0, 256, 40).astype(np.int32)
    wanted = model.logits(ids)
    np.testing.assert_allclose(model.forward(on_device(ids[None])).numpy(), wanted, rtol=1e-4, atol=1e-5)
    session = model.new_session(100)
    np.testing.assert_allclose([session.decode(int(i)) for i in ids], wanted, rtol=1e-4, atol=1e-5)
    session = model.new_session(100)
    np.testing.assert_allclose(session.prefill(ids[:30]), wanted[29], rtol=1e-4, atol=1e-5)
    for at in range(30, 36):
        np.testing.assert_allclose(session.decode(int(ids[at])), wanted[at], rtol=1e-4, atol=1e-5)
    session.truncate(33)
    assert session.position == 30  # the prompt's end
    np.testing.assert_allclose(session.prefill(ids[30:]), wanted[-1], rtol=1e-4, atol=1e-5)
    session.truncate(3)
    assert session.position == 0
    np.testing.assert_allclose(session.prefill(ids[:2]), wanted[1], rtol=1e-4, atol=1e-5)
    assert model.first_nonfinite(ids) is None


def test_memory_does_not_grow(deep: Path) -> None:
    """Far more tokens than any chunk has, in a session that takes the memory of one state."""
    model = oazoo.load(deep).model
    assert isinstance(model, CausalModel)
    session = model.new_session(1 << 20)
    ids = np.random.default_rng(3).integers(0, 256, 700).astype(np.int32)
    first = session.prefill(ids)
    np.testing.assert_allclose(model.logits(ids)[-1], first, rtol=1e-4, atol=1e-5)
    assert model.new_cache(1 << 20).nbytes == 2 * 64 * 4


@pytest.mark.parametrize(("encoding", "share"), [("q8", 0.02), ("q4", 0.4)])
def test_quantised(deep: Path, tmp_path: Path, encoding: str, share: float) -> None:
    """All weights are packed, those of the recurrence too, and the model answers nearly as before."""
    out = tmp_path / "packed.oam"
    quantize(deep, out, encoding, method="absmax")
    with OamSource(out) as source:
        packed = {name for name, tensor in source.items() if tensor.info.encoding == encoding}
    assert {
        "embed.weight",
        "layers.1.cell.input.weight",
        "layers.1.cell.state.weight",
        "head.weight",
    } <= packed
    ids = np.random.default_rng(3).integers(0, 256, 30).astype(np.int32)
    dense, model = oazoo.load(deep).logits(ids), oazoo.load(out).model
    found = model.logits(ids)
    assert np.abs(found - dense).max() < share * np.abs(dense).max()
    session = model.new_session(30)
    np.testing.assert_allclose([session.decode(int(i)) for i in ids], found, rtol=1e-3, atol=1e-4)


def test_text_goes_in_and_comes_out(deep: Path, tmp_path: Path) -> None:
    """Generation is the same in a stream, eval gives a perplexity, and training changes all weights or only corrections."""
    model = oazoo.load(deep)
    said = model.generate("The old", max_tokens=12, temperature=0)
    assert "".join(model.stream("The old", max_tokens=12, temperature=0)) == said.text
    text = tmp_path / "text.txt"
    text.write_text("The old dog saw the sun. " * 30)
    done = CliRunner().invoke(main, ["eval", str(deep), "--text", str(text), "--context", "64", "--json"])
    assert done.exit_code == 0, done.output
    settings = TrainSettings(steps=3, batch_size=2, context=16, lr=1e-3)
    tuned = finetune(deep, [text], tmp_path / "lora", settings, lora=LoraSettings(rank=2))
    assert tuned.subject.adapters is not None
    assert sorted(tuned.subject.adapters) == ["layers.0.cell.input", "layers.1.cell.input"]
    tuned.fit()
    with pytest.raises(UsageError, match=r"no linear layer .* called 'state'"):
        finetune(deep, [text], None, settings, lora=LoraSettings(rank=2), targets=["state"])
    run = train("oa-bytegru", [text], None, TrainSettings(steps=2, batch_size=2, context=16, dropout=0.2))
    run.fit()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("cell", "lstm", "cell 'lstm' is not known; known: rnn, gru"), ("hidden_size", 0, "out of range"),
     ("num_layers", 5000, "out of range"), ("hidden_size", 1 << 20, "parameters, more than")],
)  # fmt: skip
def test_configurations_that_cannot_be(field: str, value: Any, message: str) -> None:
    good = {"cell": "gru", "vocab_size": 8, "embedding_size": 4, "hidden_size": 4, "num_layers": 4000}
    assert RecurrentConfig.from_json(good).to_json()["num_layers"] == 4000
    with pytest.raises(TranslationError, match=message):
        RecurrentConfig.from_json({**good, field: value})
