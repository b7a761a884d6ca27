"""The Mamba-3 block against the published module's numbers, and against those of OA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mamba3_goldens import check_states, tensor
from mamba3_goldens import golden as published
from oa_goldens import check_layer, close, fill, golden, on_device

from oazoo.configs import Mamba3Config
from oazoo.errors import DeviceError
from oazoo.nn import Mamba3Block
from oazoo.runtime import get_device
from oazoo.runtime.ops.arithmetic import multiply, total
from oazoo.runtime.tape import GradientTape


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


BLOCKS: dict[str, dict[str, Any]] = {
    "block_b02_norm": {
        "d_state": 16,
        "headdim": 16,
        "ngroups": 2,
        "rope_fraction": 1.0,
        "A_floor": 0.5,
        "is_outproj_norm": True,
    },
    "block_b03_odd": {"d_state": 10, "headdim": 8, "ngroups": 3},
    "block_b05_mimo": {"d_state": 16, "headdim": 16, "is_mimo": True, "mimo_rank": 2},
    "block_b06_mimo_norm": {
        "d_state": 16,
        "headdim": 16,
        "ngroups": 2,
        "rope_fraction": 1.0,
        "is_mimo": True,
        "is_outproj_norm": True,
    },
}


def loaded(name: str) -> tuple[Mamba3Block, dict[str, Any]]:
    arrays = published(name)
    block = Mamba3Block(arrays["u"].shape[-1], **BLOCKS[name]).initialize(get_device())
    block.load_state_dict({k[6:]: v for k, v in arrays.items() if k.startswith("param.")})
    return block, arrays


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", BLOCKS)
def test_published_blocks(name: str) -> None:
    """Output, gradients, final states, one token more, and states at a split from which single tokens go on."""
    block, arrays = loaded(name)
    u = on_device(arrays["u"], grad=True)
    with GradientTape() as tape:
        y, states = block(u, return_states=True)
        loss = total(multiply(y, tensor(arrays["w_out"], y)))
    close(y, arrays["out"])
    check_states(states, arrays, "final")
    tape.backward(loss)
    close(u.grad, arrays["d_u"], 1e-3)
    for parameter_name, parameter in block.named_parameters():
        close(parameter.tensor.grad, arrays[f"d_param.{parameter_name}"], 1e-3)
    close(block.step(on_device(arrays["next_u"]), states), arrays["next_out"])
    check_states(states, arrays, "next")
    batch, tokens, width = arrays["u"].shape
    split = int(arrays["split_at"][0])
    first = np.ascontiguousarray(arrays["u"][:, :split])
    states = block.zero_state(batch)
    found = [block(on_device(first), states=states, into=states).numpy()]
    check_states(states, arrays, "split")
    x = on_device(np.zeros((batch, width), np.float32))
    with get_device().capture() as step:
        out = block.step(x, states)
    for t in range(split, tokens):
        x.write(arrays["u"][:, t])
        step.run()
        found.append(out.numpy()[:, None])
    close(np.concatenate(found, axis=1), arrays["out"])


OA = (
    "mamba3_forward_only",
    "mamba3_g1_rope100",
    "mamba3_g1_rope50",
    "mamba3_g1_rope50_norm",
    "mamba3_g2_rope100_norm",
    "mamba3_long",
    "mamba3_mimo2",
    "mamba3_mimo2_norm",
)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", OA)
def test_blocks_of_oa(name: str) -> None:
    arrays, c = golden(name)
    block = Mamba3Block(
        c["model_width"],
        d_state=c["state_size"],
        expand=c["expand"],
        headdim=c["head_dim"],
        ngroups=c["num_groups"],
        rope_fraction=c["rope_fraction"],
        dt_min=c["dt_min"],
        dt_max=c["dt_max"],
        A_floor=c["a_floor"],
        is_outproj_norm=c["output_norm"],
        is_mimo=c["mimo_rank"] > 1,
        mimo_rank=c["mimo_rank"],
        variant="oa",
    )
    fill(block, arrays)
    names = [n.removesuffix(".weight") for n, _ in block.named_parameters()]
    assert str(names).replace("'", '"') == str(arrays["param_names"])
    if "target" in arrays:
        check_layer(block, arrays, block)
    else:
        close(block(on_device(arrays["x"])), arrays["output"])
    if "step_output" in arrays:
        batch, tokens, _ = arrays["x"].shape
        states = block.zero_state(batch)
        steps = [
            block.step(on_device(np.ascontiguousarray(arrays["x"][:, t])), states) for t in range(tokens)
        ]
        close(np.stack([y.numpy() for y in steps], axis=1), arrays["step_output"])


def test_forms_of_the_call_agree() -> None:
    """Rows, packed rows and batches; a residual; what comes with a state and what is written into it."""
    block, arrays = loaded("block_b02_norm")
    u = arrays["u"]
    batch, tokens, width = u.shape
    wanted = block(on_device(u)).numpy()
    rows = on_device(u.reshape(-1, width))
    residual = np.ones_like(u).reshape(-1, width)
    close(block(rows, batch, residual=on_device(residual)), wanted.reshape(-1, width) + 1)
    close(block(rows, lengths=[tokens] * batch), wanted)
    states = block.zero_state(batch)
    y, final = block(rows, batch, states=states, return_states=True)
    close(y, wanted)
    assert not states.ssm.numpy().any()
    block(rows, batch, states=states, into=states)
    for mine, theirs in zip(states, final, strict=True):
        assert np.array_equal(mine.numpy(), theirs.numpy())
    states.clear()
    assert not any(t.numpy().any() for t in states.tensors())


def test_first_values() -> None:
    """The specification's, and OA's."""
    block = Mamba3Block(16, d_state=8, headdim=8, is_mimo=True, mimo_rank=2, is_outproj_norm=True)
    block.initialize(get_device(), 3)
    values = block.state_dict()
    dt = np.logaddexp(0, values["dt_bias"])
    assert (dt > 0.9e-3).all() and (dt < 0.11).all() and len(np.unique(dt)) == 4
    for name in ("B_bias", "C_bias", "D", "B_norm.weight", "C_norm.weight", "norm.weight", "mimo_z"):
        assert (values[name] == 1).all()
    assert (values["mimo_x"] == 0.5).all() and (values["mimo_o"] == 0.5).all()
    assert 0.9 / 4 < np.abs(values["in_proj.weight"]).max() <= 1 / 4
    assert 0.9 / 32**0.5 < np.abs(values["out_proj.weight"]).max() <= 1 / 32**0.5
    oa = Mamba3Block(16, d_state=8, headdim=8, variant="oa").initialize(get_device(), 3).state_dict()
    assert not oa["D"].any() and (oa["B_bias"] == 1).all() and oa["B_bias"].shape == (4, 8)
    bound = (6 / sum(oa["in_proj.weight"].shape)) ** 0.5
    assert 0.9 * bound < np.abs(oa["in_proj.weight"]).max() <= bound


@pytest.mark.parametrize("variant", ["mamba3", "oa"])
@pytest.mark.parametrize("rank", [None, 3])
def test_parameters_are_those_of_the_config(variant: str, rank: int | None) -> None:
    config = Mamba3Config(
        vocab_size=8,
        used_vocab_size=8,
        hidden_size=12,
        num_layers=1,
        inner_size=24,
        head_dim=4,
        state_size=6,
        num_groups=3,
        rope_fraction=1.0,
        mimo_rank=rank,
        output_norm=True,
        a_form="softplus",
        variant=variant,
        chunk_size=16,
    )
    block = Mamba3Block.from_config(config)
    assert {name: p.shape for name, p in block.named_parameters()} == config.block_parameters()
    assert list(config.block_parameters()) == [name for name, _ in block.named_parameters()]
    assert block.form.softplus_a and block.form.num_angles == 3 and block.chunk_size == 16


def test_refusals() -> None:
    for options, message in (
        ({"headdim": 5}, "does not divide into heads of 5"),
        ({"headdim": 8, "variant": "fast"}, "no variant 'fast'"),
        ({"headdim": 8, "ngroups": 3}, "do not divide into 3 groups"),
        ({"headdim": 8, "d_state": 7, "is_mimo": True}, "even state size"),
    ):
        with pytest.raises(DeviceError, match=message):
            Mamba3Block(16, **options)  # type: ignore[arg-type]
    block = Mamba3Block(8, d_state=4, headdim=8).initialize(get_device())
    x = on_device(np.zeros((2, 3, 8), np.float32))
    with pytest.raises(DeviceError, match="packed"):
        block(x, lengths=[3, 3])
    with pytest.raises(DeviceError, match=r"states\.angle"):
        block(x, into=block.zero_state(3))
