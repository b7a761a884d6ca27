"""EmpyrealmCore: OA's numbers over token ids, vectors that are projected or embedded already, and steps with a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oa_goldens import close, fill, golden, on_device

from oazoo.errors import UsageError
from oazoo.nn import EmpyrealmCore
from oazoo.runtime import get_device
from oazoo.runtime.ops.embedding import embedding

OPTIONS: dict[str, Any] = {"d_state": 8, "headdim": 4, "is_outproj_norm": True}


def test_the_reference_over_token_ids() -> None:
    arrays, config = golden("empyrealm")
    core = EmpyrealmCore(8, vocab_size=11, dt_min=config["dt_min"], dt_max=config["dt_max"], **OPTIONS)
    fill(core, arrays)
    ids = on_device(arrays["tokens"])
    close(core(ids), arrays["output"])
    close(core.forward_embedded(core.embedded(ids)), arrays["forward_embedded"])
    states = core.zero_state(2)
    for token in range(6):
        step = core.step(on_device(arrays["tokens"][:, token].copy()), states)
        close(step, arrays["step_output"][:, token])


def test_a_core_without_a_table_has_no_parameters_for_one() -> None:
    """What is embedded elsewhere gives the same; nothing in the core is left unused."""
    arrays, config = golden("empyrealm")
    core = EmpyrealmCore(8, dt_min=config["dt_min"], dt_max=config["dt_max"], **OPTIONS)
    assert {name.split(".")[0] for name, _ in core.named_parameters()} == {"mixer"}
    core.initialize(get_device())
    for index, parameter in enumerate(core.parameters()):
        parameter.assign(arrays[f"param_{index + 1}"])
    ids = on_device(arrays["tokens"].reshape(-1))
    x = embedding(ids, [on_device(arrays["param_0"])]).view(2, 6, 8)
    close(core.forward_embedded(x), arrays["forward_embedded"])
    states = core.zero_state(2)
    embedded = x.numpy()
    for token in range(6):
        close(
            core.step_embedded(on_device(embedded[:, token].copy()), states), arrays["step_output"][:, token]
        )
    with pytest.raises(UsageError, match="neither table nor projection"):
        core(on_device(arrays["tokens"]))


def test_vectors_are_projected() -> None:
    core = EmpyrealmCore(8, in_features=5, **OPTIONS).initialize(get_device(), 2)
    assert core.project is not None
    x = np.random.default_rng(0).normal(size=(2, 4, 5)).astype(np.float32)
    weight, bias = core.project.weight.values(), core.project.bias.values() + 0.5
    core.project.bias.assign(bias)
    projected = (x @ weight.T + bias).astype(np.float32)
    close(core.embedded(on_device(x)), projected)
    close(core(on_device(x)), core.forward_embedded(on_device(projected)).numpy())
    states = core.zero_state(2)
    steps = [core.step(on_device(x[:, token].copy()), states).numpy() for token in range(4)]
    close(np.stack(steps, 1), core(on_device(x)).numpy())
    with pytest.raises(UsageError, match="not both"):
        EmpyrealmCore(8, vocab_size=11, in_features=5)
