"""Convolutions against float64 forms that add up shifted images, their gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradient_checks import F64, check, normal

from oazoo.errors import DeviceError
from oazoo.formats.oam import OamSource
from oazoo.formats.quant import decode
from oazoo.nn import Conv2d
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops import windows
from oazoo.runtime.ops.convolution import conv1d, conv2d, conv_transpose1d, conv_transpose2d
from oazoo.runtime.ops.loss import mse
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.tape import GradientTape
from oazoo.training import SGD, TrainingStep
from oazoo.training.section import from_section

DATA = Path(__file__).parent.parent / "data" / "oa"


def both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def correlated(x: F64, w: F64, b: F64, stride: Any, padding: Any, dilation: Any, groups: int) -> F64:
    """The sum over the places of a kernel of the image as it lies under that place, times the kernel's matrix there."""
    (sy, sx), (py, px), (dy, dx) = both(stride), both(padding), both(dilation)
    x = np.pad(x, ((0, 0), (0, 0), (py, py), (px, px)))
    rows = (x.shape[2] - dy * (w.shape[2] - 1) - 1) // sy + 1
    columns = (x.shape[3] - dx * (w.shape[3] - 1) - 1) // sx + 1
    parts = []
    for own, kernel in zip(np.split(x, groups, 1), np.split(w, groups), strict=True):
        part = np.zeros((x.shape[0], kernel.shape[0], rows, columns))
        for i in range(w.shape[2]):
            for j in range(w.shape[3]):
                seen = own[:, :, i * dy :, j * dx :][
                    :, :, : (rows - 1) * sy + 1 : sy, : (columns - 1) * sx + 1 : sx
                ]
                part += np.einsum("bchw,oc->bohw", seen, kernel[:, :, i, j])
        parts.append(part)
    return np.concatenate(parts, 1) + b[:, None, None]


def spread(x: F64, w: F64, b: F64, stride: Any, padding: Any, extra: Any, dilation: Any, groups: int) -> F64:
    """Every pixel times the kernel, added up where it falls; then the padding is cut off."""
    (sy, sx), (py, px), (dy, dx), (ey, ex) = both(stride), both(padding), both(dilation), both(extra)
    rows, columns = x.shape[2:]
    parts = []
    for own, kernel in zip(np.split(x, groups, 1), np.split(w, groups), strict=True):
        size = [(n - 1) * s + d * (k - 1) + 1 + e for n, s, d, k, e in
                zip((rows, columns), (sy, sx), (dy, dx), w.shape[2:], (ey, ex), strict=True)]  # fmt: skip
        part = np.zeros((x.shape[0], kernel.shape[1], *size))
        for i in range(w.shape[2]):
            for j in range(w.shape[3]):
                place = part[:, :, i * dy :, j * dx :][
                    :, :, : (rows - 1) * sy + 1 : sy, : (columns - 1) * sx + 1 : sx
                ]
                place += np.einsum("bchw,co->bohw", own, kernel[:, :, i, j])
        parts.append(part[:, :, py : part.shape[2] - py, px : part.shape[3] - px])
    return np.concatenate(parts, 1) + b[:, None, None]


#: Sizes of x, outputs, kernel, stride, padding, dilation, groups: odd ones, each axis with its own.
CASES = [
    ((2, 3, 5, 4), 5, (3, 2), (2, 1), (1, 0), 1, 1),
    ((1, 4, 6, 7), 6, (2, 3), 1, (0, 2), (3, 2), 2),
    ((3, 1, 3, 3), 1, 3, 1, 0, 1, 1),
    ((2, 3, 4, 5), 6, 3, (1, 3), 2, 1, 3),
    ((2, 2, 1, 1), 3, 1, 5, 0, 1, 1),
    ((1, 2, 2, 3), 2, (4, 5), 2, 3, 1, 1),
]


@pytest.mark.parametrize("variant", ["products", "direct", "portable"])
@pytest.mark.parametrize("case", CASES)
def test_convolutions(case: tuple[Any, ...], variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, outputs, kernel, stride, padding, dilation, groups = case
    if variant == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")
        variant = "products"
    arrays = [normal(*shape), normal(outputs, shape[1] // groups, *both(kernel)), normal(outputs)]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    check(
        lambda x, w, b: conv2d(x, w, b, variant=variant, **options),
        lambda x, w, b: correlated(x, w, b, **options),
        arrays,
    )


#: As above; extra rows and columns after the stride.
TRANSPOSED = [
    ((2, 3, 3, 2), 4, (3, 2), (2, 1), (0, 1), 1, (1, 0), 1),
    ((1, 4, 2, 3), 6, (2, 3), (3, 2), 1, (1, 2), (2, 1), 2),
    ((2, 2, 3, 1), 2, 3, 1, 0, 1, 0, 2),
]


@pytest.mark.parametrize("variant", ["products", "direct", "portable"])
@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolutions(
    case: tuple[Any, ...], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, outputs, kernel, stride, padding, dilation, extra, groups = case
    if variant == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")
        variant = "products"
    arrays = [normal(*shape), normal(shape[1], outputs // groups, *both(kernel)), normal(outputs)]
    check(
        lambda x, w, b: conv_transpose2d(
            x,
            w,
            b,
            stride=stride,
            padding=padding,
            output_padding=extra,
            dilation=dilation,
            groups=groups,
            variant=variant,
        ),
        lambda x, w, b: spread(x, w, b, stride, padding, extra, dilation, groups),
        arrays,
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_sequences(transposed: bool) -> None:
    """Images of one row, depth-wise."""
    arrays = [normal(2, 4, 6), normal(4, 1, 3), normal(4)]
    options: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 4}
    if transposed:
        check(
            lambda x, w, b: conv_transpose1d(x, w, b, output_padding=1, **options),
            lambda x, w, b: spread(
                x[:, :, None], w[:, :, None], b, (1, 2), (0, 1), (0, 1), 1, 4
            )[:, :, 0],
            arrays,
        )  # fmt: skip
    else:
        check(
            lambda x, w, b: conv1d(x, w, b, **options),
            lambda x, w, b: correlated(x[:, :, None], w[:, :, None], b, (1, 2), (0, 1), 1, 4)[:, :, 0],
            arrays,
        )


@pytest.mark.parametrize("room", [64, 2500])
def test_pieces_of_images_and_several_images_at_a_time(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few rows the results are the same: 64 bytes make pieces of an image, 2500 one or two images."""
    monkeypatch.setattr(windows, "_BYTES", room)
    monkeypatch.setattr(windows, "_CPU_BYTES", room)
    x, w, b = normal(5, 2, 5, 4), normal(3, 2, 3, 3), normal(3)
    tensors = [Tensor.from_numpy(get_device(), a) for a in (x, w, b)]
    for tensor in tensors:
        tensor.requires_grad = True
    with GradientTape() as tape:
        y = conv2d(*tensors, padding=1)
        back = conv_transpose2d(y, tensors[1])
    wanted = correlated(*(a.astype(np.float64) for a in (x, w, b)), 1, 1, 1, 1)
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-4, atol=1e-5)
    wide = spread(wanted, w.astype(np.float64), np.zeros(2), 1, 0, 0, 1, 1)
    np.testing.assert_allclose(back.numpy(), wide, rtol=1e-4, atol=1e-4)
    tape.backward(back, Tensor.from_numpy(get_device(), np.ones(back.shape, np.float32)))
    monkeypatch.undo()
    again = [Tensor.from_numpy(get_device(), a) for a in (x, w, b)]
    for tensor in again:
        tensor.requires_grad = True
    with GradientTape() as tape:
        back = conv_transpose2d(conv2d(*again, padding=1), again[1])
    tape.backward(back, Tensor.from_numpy(get_device(), np.ones(back.shape, np.float32)))
    for one, other in zip(tensors, again, strict=True):
        assert one.grad is not None and other.grad is not None
        np.testing.assert_allclose(one.grad.numpy(), other.grad.numpy(), rtol=1e-4, atol=1e-3)


def test_a_weight_at_an_odd_address() -> None:
    x, w = normal(1, 4, 3, 3), normal(8, 4, 1, 1)
    kept = Tensor.from_numpy(get_device(), np.concatenate([[0], w.reshape(-1)]), "f32")
    found = conv2d(Tensor.from_numpy(get_device(), x), kept.rows(1, 33).view(8, 4, 1, 1)).numpy()
    wanted = correlated(x.astype(np.float64), w.astype(np.float64), np.zeros(8), 1, 0, 1, 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["products", "direct"])
@pytest.mark.parametrize("encoding", ["f16", "bf16", "q8", "q4"])
def test_weights_in_other_encodings(encoding: str, variant: str) -> None:
    """Frozen weights as they are stored; gradients flow through to x."""
    device, w = get_device(), normal(4, 3, 3, 3)
    flat = Tensor.from_numpy(device, w)
    if encoding in ("q8", "q4"):
        stored = pack(flat, encoding)
        values = decode(stored.bytes(), encoding, w.size).reshape(w.shape).astype(np.float64)
    else:
        stored = Tensor.from_numpy(device, w, encoding)
        values = stored.numpy().astype(np.float64)
    for groups, channels in ((1, 3), (2, 6)):
        check(
            lambda x, groups=groups: conv2d(x, stored, padding=1, groups=groups, variant=variant),
            lambda x, groups=groups: correlated(x, values, np.zeros(4), 1, 1, 1, groups),
            [normal(1, channels, 3, 4)],
        )
    check(
        lambda x: conv_transpose2d(x, stored, stride=2, variant=variant),
        lambda x: spread(x, values, np.zeros(3), 2, 0, 0, 1, 1),
        [normal(1, 4, 2, 3)],
    )


def test_the_checkpoint_that_oa_wrote() -> None:
    """Its weights give its output; the optimizer goes on from where it was."""
    with OamSource(DATA / "oam_conv2d_sgd.oam") as source:
        source.verify()
        weights = {name: source[name].numpy() for name in source}
        section = source.optimizer
    assert section is not None and list(weights) == ["p0", "p1"]
    with np.load(DATA / "oam_conv2d_sgd.npz") as data:
        arrays = {key: data[key] for key in data.files}
    layer = Conv2d(2, 3, 3, padding=1).initialize(get_device())
    layer.load_state_dict({"weight": weights["p0"], "bias": weights["p1"]})
    for name, key in (("weight", "p0"), ("bias", "p1")):
        assert np.array_equal(layer.state_dict()[name], arrays[key])
    found = layer(Tensor.from_numpy(get_device(), arrays["x"])).numpy()
    np.testing.assert_allclose(found, arrays["output"], rtol=1e-4, atol=1e-5)
    optimizer = SGD(layer.named_parameters(), compat="oa")
    from_section(optimizer, section)
    step = TrainingStep(lambda x, y: mse(layer(x), y), optimizer)
    step(arrays["x"], arrays["target"])
    losses = step.losses()
    np.testing.assert_allclose(losses[0], np.mean((arrays["output"] - arrays["target"]) ** 2), rtol=1e-5)
    assert losses[0] < arrays["losses"][-1] and optimizer.steps_taken == 3


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda x, w: conv2d(x, w, padding=-1), "padding must be at least 0"),
        (lambda x, w: conv2d(x, w, padding=(1, -2)), "padding must be at least 0"),
        (lambda x, w: conv2d(x, w, stride=0), "stride must be at least 1"),
        (lambda x, w: conv2d(x, w, stride=1.5), "stride must be at least 1"),
        (lambda x, w: conv2d(x, w, stride=(1, 2, 3)), "stride must be at least 1"),
        (lambda x, w: conv2d(x, w, dilation=0), "dilation must be at least 1"),
        (
            lambda x, w: conv2d(x, w, dilation=2),
            "a kernel of 3 with dilation 2, which spans 5, is larger than",
        ),
        (
            lambda x, w: conv2d(x.view(1, 4, 2, 8), w),
            "a kernel of 3 is larger than the image's 2 with padding 0",
        ),
        (lambda x, w: conv2d(x, w, padding=2**40), "padding must be at least 0"),
        (lambda x, w: conv2d(x, w, padding=2**30), "more than one run can address"),
        (lambda x, w: conv2d(x, w, padding=2**20), "more than one run can address"),
        (lambda x, w: conv2d(x, w, groups=3), "do not divide into 3 groups"),
        (lambda x, w: conv2d(x, w, groups=0), "groups must be at least 1"),
        (lambda x, w: conv2d(x, w, groups=2), r"weight must be of shape \[6, 2, 3, 3\]"),
        (lambda x, w: conv2d(x.view(4, 4, 4), w), "x must be f32"),
        (lambda x, w: conv2d(x, w.view(6, 4, 9)), "weight must have four axes"),
        (lambda x, w: conv2d(x, w, w.view(216)), r"bias must be f32\[6\]"),
        (lambda x, w: conv2d(x, w, variant="fast"), "there is no variant 'fast'"),
        (lambda x, w: conv2d(x, Tensor.empty(x.device, (2, 4, 1, 1), "i32")), "weight cannot be i32"),
        (lambda x, w: conv2d(Tensor.empty(x.device, (0, 4, 4, 4)), w), "have no values"),
        (lambda x, w: conv1d(x, w), "x must be f32"),
        (lambda x, w: conv1d(x.view(4, 4, 4), w), "weight must have three axes"),
        (lambda x, w: conv_transpose2d(x, w), r"weight must be of shape \[4, 4, 3, 3\]"),
        (lambda x, w: conv_transpose2d(x, w.view(4, 6, 3, 3), padding=4), "nothing is left of a result"),
        (lambda x, w: conv_transpose2d(x, w.view(4, 6, 3, 3), output_padding=1), "less than the stride"),
        (lambda x, w: conv_transpose2d(x, w.view(4, 6, 3, 3), groups=-2), "groups must be at least 1"),
        (lambda x, w: conv_transpose2d(x, w.view(4, 6, 3, 3), stride=2**30), "more than one run can address"),
    ],
)
def test_what_does_not_fit_is_refused(form: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    device = get_device()
    x = Tensor.from_numpy(device, np.zeros((1, 4, 4, 4), np.float32))
    w = Tensor.from_numpy(device, np.zeros((6, 4, 3, 3), np.float32))
    with pytest.raises(DeviceError, match=message) as error:
        form(x, w)
    assert "\n" not in str(error.value)
