"""Images and sequences as the tokens of a flow model, and back: scaling, and the order of values within a patch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oazoo.configs import FlowConfig

Floats = npt.NDArray[np.float32]


def to_tokens(config: FlowConfig, values: Floats) -> Floats:
    """Values as the model sees them.

    Args:
        config: says the scale; of images also the size of patches.
        values: f32 [items, height, width, channels] of images, in the data's units, or [items, tokens, token_size].

    Returns:
        f32 [items, tokens, token_size]; patches row by row, in a patch channel by channel, row by row.
    """
    offset, scale = _scaling(config)
    x = (values - offset) / scale
    if not config.is_image:
        return np.ascontiguousarray(x)
    p, height, width = config.patch, config.image_height // config.patch, config.image_width // config.patch
    x = x.reshape(-1, height, p, width, p, config.image_channels).transpose(0, 1, 3, 5, 2, 4)
    return np.ascontiguousarray(x.reshape(-1, config.tokens, config.token_size))


def from_tokens(config: FlowConfig, tokens: Floats) -> Floats:
    """What the model made, in the data's units: the way back of :func:`to_tokens`, kept within the range of the data."""
    offset, scale = _scaling(config)
    x = np.clip(tokens, -1, 1) if config.clip else tokens
    if config.is_image:
        p, height, width = (
            config.patch,
            config.image_height // config.patch,
            config.image_width // config.patch,
        )
        x = x.reshape(-1, height, width, config.image_channels, p, p).transpose(0, 1, 4, 2, 5, 3)
        x = x.reshape(-1, config.image_height, config.image_width, config.image_channels)
    return np.ascontiguousarray(x * scale + offset)


def _scaling(config: FlowConfig) -> tuple[Floats, Floats]:
    return np.asarray(config.data_offset, np.float32), np.asarray(config.data_scale, np.float32)


def wave_positions(config: FlowConfig) -> Floats:
    """Positions that are not learned, as DiT has them: f32 [tokens, hidden_size].

    Of images, the first half of the width tells the column of a patch and the second its row, of sequences all of it the
    place: sines, then cosines, of the place over wavelengths up to 10,000. A width that does not divide ends in zeros.
    """
    if config.is_image:
        rows, columns = config.image_height // config.patch, config.image_width // config.patch
        row, column = np.divmod(np.arange(config.tokens), columns)
        assert rows * columns == config.tokens
        places = [column, row]
    else:
        places = [np.arange(config.tokens)]
    found = np.zeros((config.tokens, config.hidden_size), np.float32)
    half = config.hidden_size // (2 * len(places))
    for number, place in enumerate(places):
        angles = place[:, None] * 10_000.0 ** (-np.arange(half) / half)
        first = number * 2 * half
        found[:, first : first + 2 * half] = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    return found
