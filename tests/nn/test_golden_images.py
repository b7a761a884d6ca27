"""Layers of images and sequences against the reference numbers of OA, by the device's kernels and by portable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oa_goldens import check_layer, fill, golden

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
