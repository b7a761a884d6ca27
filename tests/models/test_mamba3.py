"""Mamba-3 language models: the reference's logits, sessions with a state of fixed size, packed weights, first values."""

from __future__ import annotations

import json
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from oa_goldens import check_gradients, golden, on_device
from oa_goldens import fill as fill_model
from safetensors.numpy import load_file

import oazoo
from oazoo.configs import EmpyrealmConfig, Mamba3Config, config_from_json
from oazoo.errors import GenerationError
from oazoo.generation.chat_session import ChatSession
from oazoo.generation.text_model import TextModel
from oazoo.models import CausalModel, build
from oazoo.models import session as session_module
from oazoo.models.cache import StateCache
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.loss import cross_entropy
from oazoo.runtime.tape import GradientTape
from oazoo.text import Tokenizer
from oazoo.text.train import byte_tokenizer_json
from oazoo.translators.mamba3 import source_name
from oazoo.zoo.calibrate import calibrate

Array = npt.NDArray[Any]
DATA = Path(__file__).parents[1] / "data" / "mamba3"
NAMES = ("lm_siso", "lm_mimo_mlp")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mamba3")
    for name in NAMES:
        oazoo.convert(DATA / name / "model.safetensors", folder / f"{name}.oam")
    return {name: folder / f"{name}.oam" for name in NAMES}


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, converted: dict[str, Path]) -> tuple[CausalModel, dict[str, Array]]:
    """A golden's model, and what the reference computed."""
    model = oazoo.load(converted[request.param]).model
    assert isinstance(model, CausalModel)
    with np.load(DATA / request.param / "io.npz") as file:
        return model, {"name": request.param, **{key: file[key] for key in file.files}}


def apart(found: Array, wanted: Array) -> float:
    return float(np.abs(found - wanted).max())


def test_logits_however_they_come_about(
    case: tuple[CausalModel, dict[str, Array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, io = case
    tokens, wanted, used = io["tokens"].astype(np.int32), io["logits"], model.used_vocab_size
    assert apart(model.logits(tokens), wanted) < 1e-4
    found = model.forward(Tensor.from_numpy(get_device(), tokens)).numpy()
    assert apart(found.reshape(wanted.shape), wanted) < 1e-4
    ids, row = tokens[0], wanted[0, :, :used]
    session = model.new_session(1)
    assert apart(np.stack([session.decode(int(i)) for i in ids]), row) < 1e-4
    # A prompt in uneven pieces, then step by step: the state goes from the one to the other, and back.
    monkeypatch.setattr(session_module, "CHUNK", 7)
    session = model.new_session(1)
    assert apart(session.prefill(ids[:10]), row[9]) < 1e-4
    assert apart(session.decode(int(ids[10])), row[10]) < 1e-4
    assert apart(session.prefill(ids[11:]), row[-1]) < 1e-4
    assert session.position == len(ids)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients(case: tuple[CausalModel, dict[str, Array]], checkpointing: bool) -> None:
    """Of the mean cross-entropy over the padded vocabulary, with respect to every weight."""
    model, io = case
    model.requires_grad_()
    model.checkpointing = checkpointing
    tokens = io["tokens"].astype(np.int32)
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].reshape(-1).copy()
    with GradientTape() as tape:
        loss = model.loss(on_device(inputs), on_device(targets))
    tape.backward(loss)
    assert abs(float(loss.numpy()[0]) - float(io["loss"][0])) < 1e-5
    wanted = load_file(DATA / f"{io['name']}.grads.safetensors")
    for name, parameter in model.named_parameters():
        gradient = parameter.tensor.grad
        assert gradient is not None, name
        source = wanted[source_name(name)]
        if ".mlp.up." in name or ".mlp.gate." in name:  # values first, then their gates
            source = np.split(source, 2)[".mlp.gate." in name]
        assert apart(gradient.numpy(), source) <= 1e-3 * np.abs(source).max(), name


def test_greedy_continuation(case: tuple[CausalModel, dict[str, Array]]) -> None:
    model, io = case
    result = TextModel(model).generate(
        ids=io["prompt"].reshape(-1).tolist(), temperature=0, max_tokens=io["greedy_tokens"].size
    )
    assert result.token_ids == io["greedy_tokens"].reshape(-1).tolist()


def test_going_back(case: tuple[CausalModel, dict[str, Array]]) -> None:
    """A state cannot be undone: a session goes back to the end of a prompt, or the beginning, and says where it is."""
    model, io = case
    ids, wanted = io["tokens"][0].astype(np.int32), io["logits"][0, :, : model.used_vocab_size]
    session = model.new_session(100)
    session.prefill(ids[:5])
    session.prefill(ids[5:9])
    for token in (3, 1, 4):
        session.decode(token)
    session.truncate(12)
    assert session.position == 12
    session.truncate(11)
    assert session.position == 9
    assert apart(session.prefill(ids[9:]), wanted[-1]) < 1e-4
    session.truncate(8)
    assert session.position == 5
    assert apart(session.decode(int(ids[5])), wanted[5]) < 1e-4
    session.truncate(4)
    assert session.position == 0
    assert apart(session.prefill(ids[:2]), wanted[1]) < 1e-4
    with pytest.raises(GenerationError, match="cannot go back to position 3 from 2"):
        session.truncate(3)


def test_a_state_has_one_size(case: tuple[CausalModel, dict[str, Array]]) -> None:
    """However long the sequence; and a session is told of more tokens than it was made for."""
    model, io = case
    short, long = model.new_cache(1), model.new_cache(1 << 24)
    assert isinstance(short, StateCache) and short.nbytes == long.nbytes < 100_000
    session = model.new_session(1)
    session.prefill(np.tile(io["tokens"][0].astype(np.int32), 30))
    assert np.isfinite(session.decode(1)).all() and session.position == 30 * io["tokens"].shape[1] + 1


def test_padding_is_never_chosen(converted: dict[str, Path]) -> None:
    """Rows behind the vocabulary have logits, the largest here; they are neither sampled nor taken as a prompt."""
    model = oazoo.load(converted["lm_mimo_mlp"]).model
    assert isinstance(model, CausalModel) and (model.vocab_size, model.used_vocab_size) == (64, 61)
    state = model.state_dict()
    head = np.array(state["head.weight"])
    head[61:] *= 1000
    model.load_state_dict({**state, "head.weight": head})
    ids = [1, 2, 3]
    assert (model.logits([ids])[0].argmax(1) >= 61).any()
    for temperature in (0, 5.0):
        found = TextModel(model).generate(
            ids=ids, temperature=temperature, max_tokens=40, seed=1, repeat_penalty=1.1
        )
        assert max(found.token_ids) < 61
    with pytest.raises(GenerationError, match="token id 61 is outside the model's vocabulary of 61"):
        TextModel(model).generate(ids=[61])


def test_conversations_go_on_from_the_state() -> None:
    """Of a second turn only what is new is read; the answers are those of a model that reads everything again."""
    config = Mamba3Config(
        vocab_size=256,
        used_vocab_size=256,
        hidden_size=16,
        num_layers=2,
        inner_size=32,
        head_dim=8,
        state_size=8,
    )
    model = build(config, get_device()).initialize(get_device(), 3)
    text = TextModel(
        model, Tokenizer(byte_tokenizer_json()), "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    )
    with ChatSession(text, temperature=0, max_tokens=6) as chat:
        results = []
        for said in ("Hello", "And then?"):
            with chat.send(said) as stream:
                "".join(stream)
            results.append(stream.result)
        first, second = results
        assert first.reused_tokens == 0
        # The answer's bytes are no text as a rule, and what is no text is not read back as it was.
        assert second.reused_tokens >= len(first.prompt_ids)
        again = text.generate(ids=second.prompt_ids, temperature=0, max_tokens=6)
        assert again.token_ids == second.token_ids


@pytest.mark.parametrize("to", ["q8", "q4"])
def test_packed_weights(to: str, converted: dict[str, Path], tmp_path: Path) -> None:
    """Matrices run packed; what the recurrence keeps stays as it was. All ways of running agree."""
    path = converted["lm_mimo_mlp"]
    oazoo.quantize(path, tmp_path / "packed.oam", to)
    packed = oazoo.load(tmp_path / "packed.oam").model
    assert isinstance(packed, CausalModel)
    kinds = {name: parameter.shards[0].dtype for name, parameter in packed.named_parameters()}
    for name, kind in kinds.items():
        matrix = name.endswith(".weight") and len(packed.config.parameters()[name]) == 2  # type: ignore[attr-defined]
        assert kind == (to if matrix else "f32"), name
    dense = build(packed.config, get_device())  # type: ignore[attr-defined]
    dense.load_state_dict(packed.state_dict(), get_device())
    with np.load(DATA / "lm_mimo_mlp" / "io.npz") as file:
        tokens = file["tokens"].astype(np.int32)
    found, wanted = packed.logits(tokens), dense.logits(tokens)
    largest = np.abs(wanted).max()
    assert apart(found, wanted) < 1e-4 * largest
    forward = packed.forward(Tensor.from_numpy(get_device(), tokens)).numpy()
    assert apart(forward.reshape(found.shape), wanted) < 1e-4 * largest
    session = packed.new_session(1)
    steps = np.stack([session.decode(int(token)) for token in tokens[0]])
    assert apart(steps, wanted[0, :, :61]) < 1e-4 * largest


def test_statistics_cover_every_matrix() -> None:
    """What calibration needs of the model: each of its matrices multiplies where the observer sees it."""
    config = Mamba3Config(
        vocab_size=256, used_vocab_size=256, hidden_size=16, num_layers=2, inner_size=32, head_dim=8, state_size=8,
        mlp_size=8,
    )  # fmt: skip
    model = build(config, get_device()).initialize(get_device(), 3)
    found = calibrate(
        TextModel(model, Tokenizer(byte_tokenizer_json())), "All that is gold does not glitter. " * 4
    )
    matrices = {
        name for name, shape in config.parameters().items() if name.endswith(".weight") and len(shape) == 2
    }
    assert set(found.shares) == matrices
    assert found.moment("layers.1.mixer.out_proj.weight", 32) is not None


def test_first_values() -> None:
    """Those of the specification, §7."""
    config = Mamba3Config(
        vocab_size=512, used_vocab_size=512, hidden_size=64, num_layers=4, inner_size=128, head_dim=2, state_size=16,
        mimo_rank=2, output_norm=True, mlp_size=128, tied_embeddings=False,
    )  # fmt: skip
    model = build(config, get_device()).initialize(get_device(), 1)
    state = model.state_dict()
    assert list(state) == list(config.parameters())
    assert abs(state["embed.weight"].std() - 0.02) < 1e-3
    bounds = {"mixer.in_proj": 64**-0.5, "mixer.out_proj": 128**-0.5 / 2}
    bounds |= {"mlp.gate": 64**-0.5, "mlp.up": 64**-0.5, "mlp.down": 128**-0.5 / 2}
    for name, bound in bounds.items():
        values = state[f"layers.2.{name}.weight"]
        assert abs(values.std() * sqrt(3) / bound - 1) < 0.05 and np.abs(values).max() <= bound * (
            1 + 1e-6
        ), name
    assert np.abs(state["head.weight"]).max() <= 0.125
    for name, value in {
        "B_bias": 1,
        "C_bias": 1,
        "D": 1,
        "norm.weight": 1,
        "mimo_x": 0.5,
        "mimo_z": 1,
        "mimo_o": 0.5,
    }.items():
        assert (state[f"layers.3.mixer.{name}"] == value).all(), name
    dt = np.log1p(np.exp(state["layers.0.mixer.dt_bias"].astype(np.float64)))
    assert 0.000999 < dt.min() < 0.003 and 0.04 < dt.max() < 0.1001
    assert abs(np.log(dt).mean() - (log(0.1) + log(0.001)) / 2) < 0.6


@pytest.mark.parametrize("name", ["bytemamba3", "byteempyrealm"])
def test_models_of_oa(name: str) -> None:
    arrays, _ = golden(name)
    config = EmpyrealmConfig.byte_mamba3()
    model = build(config, get_device())
    assert {n: p.shape for n, p in model.named_parameters()} == config.parameters()
    assert list(config.parameters()) == [n for n, _ in model.named_parameters()]
    fill_model(model, {k: v for k, v in arrays.items() if "after" not in k})
    with GradientTape() as tape:
        logits = model.forward(on_device(arrays["tokens"]))
        loss = cross_entropy(logits, on_device(arrays["targets"]))
    assert apart(logits.numpy(), arrays["logits"]) < 1e-5
    tape.backward(loss)
    check_gradients(model, arrays)
    session = model.new_session(1)
    steps = np.stack([session.decode(int(token)) for token in arrays["tokens"][1]])
    assert apart(steps, arrays["logits"][16:]) < 1e-5
    assert config_from_json("empyrealm", json.loads(json.dumps(config.to_json()))) == config
