"""Stop texts are found however the text is cut, and nothing else is lost."""

from __future__ import annotations

import random

import pytest

from oazoo.generation.stops import StopMatcher


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop text that begins first."""
    hits = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(hits)] if hits else text


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
    return out + matcher.flush(), matcher.found


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("Hello END more", ["END"]), ("Hello EN", ["END"]), ("EEND", ["END"]), ("abcabd", ["abd"]), ("", ["x"]),
        ("abcx", ["bc", "abcd"]), ("abcd", ["bc", "abcd"]), ("a\n\nb", ["\n\n"]), ("🙂é한🙂", ["한"]), ("aaa", ["aa"]),
        ("no stops at all", []),
    ],
)  # fmt: skip
def test_every_way_to_cut_a_text_gives_the_same(text: str, stops: list[str]) -> None:
    expected = cut(text, stops)
    for mask in range(1 << max(0, len(text) - 1)) if len(text) < 9 else [0, (1 << (len(text) - 1)) - 1]:
        pieces, start = [], 0
        for i in range(1, len(text)):
            if mask >> (i - 1) & 1:
                pieces.append(text[start:i])
                start = i
        out, found = run([*pieces, text[start:]], stops)
        assert out == expected
        assert (found is not None) == (expected != text)


def test_random_texts() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("abc", k=rng.randrange(12)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        pieces, rest = [], text
        while rest:
            n = rng.randrange(1, 4)
            pieces.append(rest[:n])
            rest = rest[n:]
        assert run(pieces, stops)[0] == cut(text, stops)


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("A") == "ENA"
    assert matcher.push(" END") == " "
    assert matcher.found == "END" and matcher.push("more") == "" and matcher.flush() == ""
