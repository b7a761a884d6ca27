"""Axes in another order, and patches: values, order and gradients against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gradient_checks import F64, check, normal

from oazoo.errors import DeviceError
from oazoo.formats.quant import decode
from oazoo.nn import PatchEmbed
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.patches import patchify, permute, unpatchify


@pytest.mark.parametrize(
    "order", [(0,), (1, 0), (2, 0, 1), (3, 1, 0, 2), (5, 0, 4, 1, 3, 2), (0, 1, 2, 3, 4, 5)]
)
def test_axes_in_another_order(order: tuple[int, ...]) -> None:
    x = normal(*(2, 3, 4, 3, 2, 5)[: len(order)])
    found = permute(Tensor.from_numpy(get_device(), x), order).numpy()
    assert np.array_equal(found, x.transpose(order))


def test_gradient_of_an_order() -> None:
    check(lambda x: permute(x, (2, 0, 1)), lambda x: x.transpose(2, 0, 1), [normal(2, 3, 4)])


def by_hand(x: F64, patch: int, channels_last: bool) -> F64:
    """Patches cut out one by one."""
    batch, _, height, width = x.shape
    cut = [
        x[:, :, top : top + patch, left : left + patch]
        for top in range(0, height, patch)
        for left in range(0, width, patch)
    ]
    cut = [part.transpose(0, 2, 3, 1) if channels_last else part for part in cut]
    return np.stack([part.reshape(batch, -1) for part in cut], 1)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("shape", "patch"), [((2, 3, 4, 6), 2), ((1, 1, 3, 3), 3), ((3, 2, 2, 5), 1)])
def test_patches_and_back(shape: tuple[int, ...], patch: int, channels_last: bool) -> None:
    x = normal(*shape)
    wanted = by_hand(x.astype(np.float64), patch, channels_last)
    tensor = Tensor.from_numpy(get_device(), x)
    rows = patchify(tensor, patch, channels_last=channels_last)
    assert np.array_equal(rows.numpy(), wanted.astype(np.float32))
    again = unpatchify(rows, shape[2], shape[3], patch, channels_last=channels_last)
    assert np.array_equal(again.numpy(), x)


def test_the_last_layer_of_dit() -> None:
    """Its unpatchify, as published: reshape to n h w p q c, then 'nhwpqc->nchpwq'."""
    x = normal(2, 6, 2 * 2 * 3)
    wanted = np.einsum("nhwpqc->nchpwq", x.reshape(2, 2, 3, 2, 2, 3)).reshape(2, 3, 4, 6)
    assert np.array_equal(unpatchify(Tensor.from_numpy(get_device(), x), 4, 6, 2).numpy(), wanted)


def embedded(x: F64, weight: F64, bias: F64, patch: int) -> F64:
    return by_hand(x, patch, False) @ weight.reshape(weight.shape[0], -1).T + bias


def test_embedding_is_a_convolution_by_strides_with_gradients() -> None:
    layer = PatchEmbed(3, 5, 2)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]

    def form(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layer.weight.shards, layer.bias.shards = (weight,), (bias,)
        return layer(x)

    arrays = [normal(2, 3, 4, 6), normal(5, 3, 2, 2), normal(5)]
    check(form, lambda x, w, b: embedded(x, w, b, 2), arrays)


@pytest.mark.parametrize("encoding", ["f16", "bf16", "q8", "q4"])
def test_embedding_by_packed_weights(encoding: str) -> None:
    device, x, weight = get_device(), normal(2, 2, 4, 4), normal(3, 2, 2, 2)
    layer = PatchEmbed(2, 3, 2, bias=False)
    flat = Tensor.from_numpy(device, weight)
    if encoding in ("q8", "q4"):
        stored = pack(flat, encoding)
        values = decode(stored.bytes(), encoding, weight.size).reshape(weight.shape)
    else:
        stored = Tensor.from_numpy(device, weight, encoding)
        values = stored.numpy().astype(np.float32)
    layer.weight.shards = (stored,)
    found = layer(Tensor.from_numpy(device, x)).numpy()
    wanted = embedded(x.astype(np.float64), values.astype(np.float64), np.zeros(3), 2)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda x: permute(x, (0, 1, 2)), "no order of the axes"),
        (lambda x: permute(x, (0, 1, 1, 3)), "no order of the axes"),
        (lambda x: permute(x, (0, 1, 2, -1)), "no order of the axes"),
        (lambda x: patchify(x, 4), "do not divide into patches"),
        (lambda x: patchify(x, 0), "do not divide into patches"),
        (lambda x: patchify(x, -2), "do not divide into patches"),
        (lambda x: patchify(x.view(3, 4, 12), 2), "x must be f32"),
        (lambda x: unpatchify(x.view(1, 6, 24), 4, 8, 2), "6 patches are not the 2 x 4"),
        (lambda x: unpatchify(x.view(1, 6, 24), 4, 7, 2), "do not divide into patches"),
        (lambda x: unpatchify(x.view(1, 16, 9), 8, 8, 2), "no whole channels"),
        (lambda x: unpatchify(x.view(1, 6, 24), -4, -6, 2), "do not divide into patches"),
    ],
)
def test_what_does_not_fit_is_refused(form: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        form(Tensor.from_numpy(get_device(), np.zeros((2, 3, 4, 6), np.float32)))
