"""Layers of images and sequences against the reference numbers of OA, by the device's kernels and by portable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oa_goldens import check_layer, close, fill, golden, on_device

from oazoo import nn


@pytest.fixture(params=["device", "portable"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


CONVOLUTIONS: dict[str, type[nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d | nn.ConvTranspose2d]] = {
    **dict.fromkeys(("conv1d_s1p0d1k3", "conv1d_s1p2d2k3", "conv1d_s2p1d1k3", "conv1d_s3p2d1k4"), nn.Conv1d),
    **dict.fromkeys(("conv2d_s1p0g1k3", "conv2d_s1p1g2k3", "conv2d_s2p0g1k2", "conv2d_s2p1g1k3"), nn.Conv2d),
    **dict.fromkeys(
        ("convtranspose1d_s1p0k3", "convtranspose1d_s2p0k2", "convtranspose1d_s2p1k3"), nn.ConvTranspose1d
    ),
    **dict.fromkeys(
        ("convtranspose2d_s1p0k3", "convtranspose2d_s2p0k2", "convtranspose2d_s2p1k3"), nn.ConvTranspose2d
    ),
}


def convolution(name: str, config: dict[str, Any]) -> nn.Module:
    options = {key: config[key] for key in ("stride", "padding", "dilation", "groups") if key in config}
    bias = not name.startswith("convtranspose1d")  # OA's has none
    return CONVOLUTIONS[name](config["cin"], config["cout"], config["kernel"], bias=bias, **options)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    arrays, config = golden(name)
    layer = convolution(name, config)
    fill(layer, arrays)
    form: Callable[..., Any] = layer  # type: ignore[assignment]
    check_layer(layer, arrays, form)


WITHOUT_WEIGHTS: dict[str, nn.Module] = {
    "maxpool2d_k2": nn.MaxPool2d(2),
    "maxpool2d_k3s2p1": nn.MaxPool2d(3, 2, 1),
    "avgpool2d_k2": nn.AvgPool2d(2),
    "avgpool2d_k3s2p1": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "adaptiveavgpool2d_3x2": nn.AdaptiveAvgPool2d((3, 2)),
    "upsample_nearest2": nn.Upsample(2),
    "upsample_bilinear2": nn.Upsample(2, "bilinear"),
}


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_pooling_and_upsampling(name: str) -> None:
    arrays, _ = golden(name)
    layer = WITHOUT_WEIGHTS[name]
    form: Callable[..., Any] = layer  # type: ignore[assignment]
    check_layer(layer, arrays, form)


def test_batch_norm() -> None:
    arrays, config = golden("batchnorm2d")
    layer = nn.BatchNorm2d(config["features"], config["epsilon"], config["momentum"], compat="oa")
    fill(layer, arrays)
    layer.train()
    check_layer(layer, arrays, layer)
    close(layer.running_mean.tensor, arrays["running_mean_after"])
    close(layer.running_var.tensor, arrays["running_var_after"])
    close(layer.eval()(on_device(arrays["x"])), arrays["eval_output"])
