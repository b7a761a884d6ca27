"""Philox 4x32-10 in plain numbers, to hold draws of the device against."""

from __future__ import annotations


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox 4x32-10 as the paper defines it."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = right >> 32 ^ b ^ k, right & 0xFFFFFFFF, left >> 32 ^ d ^ m, left & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d
