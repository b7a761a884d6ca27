"""The oa_bpe_v1 tokenizer against OA's own files, a naive implementation, and hostile vocabulary files."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from oazoo.errors import TokenizerError, UsageError
from oazoo.text import OaBpeTokenizer
from oazoo.text.oa_bpe import MAX_MERGES, learn_merges

GOLDEN = Path(__file__).parent.parent / "data" / "oa"
VOCABULARY = (GOLDEN / "bpe_vocab.txt").read_bytes()


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((GOLDEN / "bpe.json").read_text("utf-8"))
    return document


@pytest.fixture(scope="module")
def tokenizer() -> OaBpeTokenizer:
    return OaBpeTokenizer.from_bytes(VOCABULARY)


def naive_merges(data: bytes, count: int) -> list[tuple[int, int]]:
    """The training rule as it is stated, counted anew for each merge."""
    ids, merges = list(data), []
    while len(merges) < count:
        pairs = list(pairwise(ids))
        best = min(set(pairs), key=lambda pair: (-pairs.count(pair), pair), default=None)
        if best is None or pairs.count(best) < 2:
            break
        ids = naive_merge(ids, best, 256 + len(merges))
        merges.append(best)
    return merges


def naive_merge(ids: list[int], pair: tuple[int, int], made: int) -> list[int]:
    result, i = [], 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair:
            result.append(made)
            i += 2
        else:
            result.append(ids[i])
            i += 1
    return result


def test_training_reproduces_the_golden_merges(golden: dict[str, Any]) -> None:
    wanted = golden["num_merges_requested"]
    trained = OaBpeTokenizer.train([golden["training_text"]], golden["target_vocab"], max_merges=wanted)
    assert trained.to_bytes() == VOCABULARY
    assert trained.vocab_size == golden["vocab_size"]


def test_reading_and_writing_is_exact(tokenizer: OaBpeTokenizer) -> None:
    assert tokenizer.to_bytes() == VOCABULARY
    assert OaBpeTokenizer.from_bytes(VOCABULARY.replace(b"\n", b"\r\n")).merges == tokenizer.merges
    assert OaBpeTokenizer.from_bytes(VOCABULARY.removesuffix(b"\n")).merges == tokenizer.merges


def test_golden_encodings(golden: dict[str, Any], tokenizer: OaBpeTokenizer) -> None:
    for case in golden["cases"]:
        assert tokenizer.encode_bytes(bytes(case["utf8"])) == case["ids"]
        assert b"".join(tokenizer.token_bytes(i) or b"" for i in case["ids"]) == bytes(case["decoded"])
        if "text" in case:
            assert tokenizer.encode(case["text"]) == case["ids"]
            assert tokenizer.decode(case["ids"]) == case["decoded_text"]
    for case in golden["cases_token_decode"]:
        assert tokenizer.token_bytes(case["ids"][0]) == bytes(case["decoded"])
    for case in golden["bad"]:
        assert tokenizer.decode(case["ids"]) == ""
    for case in golden["prompt"]:
        assert tokenizer.encode_window(case["text"], case["context_length"]) == case["ids"]
    with pytest.raises(UsageError, match="at least one token"):
        tokenizer.encode_window("the", 0)


def test_golden_edges_of_training(golden: dict[str, Any]) -> None:
    for case in golden["exhaust"]:
        trained = OaBpeTokenizer.train(
            [case["text"]], case["target_vocab"], max_merges=case["num_merges_requested"]
        )
        assert (len(trained.merges), trained.vocab_size) == (case["num_merges"], case["vocab_size"])
        assert trained.encode(case["text"]) == case["ids"]
        assert trained.encode("aaaaa") == case["aaaa"]


@pytest.mark.parametrize("seed", range(30))
def test_training_and_encoding_follow_the_stated_rule(seed: int) -> None:
    draw = random.Random(seed)
    letters = [b"ab", b"abc", b"aaab", bytes(range(250, 256))][seed % 4]
    data = bytes(draw.choice(letters) for _ in range(draw.randrange(2, 160)))
    merges = naive_merges(data, 40)
    assert learn_merges([data], 40) == merges
    other = bytes(draw.choice(letters) for _ in range(120))
    ids = list(other)
    for rank, pair in enumerate(merges):
        ids = naive_merge(ids, pair, 256 + rank)
    tokenizer = OaBpeTokenizer(merges)
    assert tokenizer.encode_bytes(other) == ids
    assert b"".join(tokenizer.token_bytes(i) or b"" for i in ids) == other


def test_no_pair_is_counted_across_two_texts() -> None:
    assert learn_merges(["ab", "ab", "ba"], 5) == [(97, 98)]
    assert learn_merges(["xy", "zxy", "", "z"], 5) == [(120, 121)]


def test_a_stream_gives_whole_characters(tokenizer: OaBpeTokenizer) -> None:
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode("café ☃")]
    assert "".join(pieces) + stream.flush() == "café ☃"
    assert all("\ufffd" not in piece for piece in pieces)


def test_spelling_and_lookup(tokenizer: OaBpeTokenizer) -> None:
    assert tokenizer.token(260) == "theĠ" and tokenizer.token_id("theĠ") == 260
    assert tokenizer.token(296) is None and tokenizer.token_id("nothing of the sort") is None


def test_two_merges_may_spell_the_same_text() -> None:
    tokenizer = OaBpeTokenizer([(97, 98), (98, 99), (256, 99), (97, 257)])
    assert tokenizer.token(258) == tokenizer.token(259) == "abc"
    assert tokenizer.token_id("abc") == 258
    assert tokenizer.decode([258, 259]) == "abcabc"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "first line"),
        (b"oa_bpe_v2\n0\n", "first line"),
        (b"\xff\xfe" + VOCABULARY, "first line"),
        (b"oa_bpe_v1", "line 2"),
        (b"oa_bpe_v1\n-1\n", "line 2"),
        (b"oa_bpe_v1\n1.0\n97 98\n", "line 2"),
        (b"oa_bpe_v1\n99999999999999999999\n", "line 2"),
        (b"oa_bpe_v1\n2\n97 98\n", "says that it has 2 merges, but 1"),
        (b"oa_bpe_v1\n1\n97 98\n98 99\n", "says that it has 1 merges, but 2"),
        (b"oa_bpe_v1\n1\n97 98 99\n", "line 3"),
        (b"oa_bpe_v1\n1\n97\xc3\xa9 98\n", "line 3"),
        (b"oa_bpe_v1\n1\n97\xff98\n", "line 3"),
        (b"oa_bpe_v1\n1\n97 +98\n", "line 3"),
        (b"oa_bpe_v1\n1\n\xd9\xa1 98\n", "line 3"),
        (b"oa_bpe_v1\n1\n97 256\n", "merge 0 uses id 256"),
        (b"oa_bpe_v1\n2\n97 258\n97 98\n", "merge 0 uses id 258"),
        (b"oa_bpe_v1\n2\n97 98\n97 98\n", "merge 1 .97 98. is the same as merge 0"),
    ],
)
def test_hostile_vocabulary_files(data: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        OaBpeTokenizer.from_bytes(data)


def test_merges_that_double_are_refused_before_they_fill_memory() -> None:
    merges = [(97, 97), *((255 + i, 255 + i) for i in range(1, 60))]
    lines = "\n".join(["oa_bpe_v1", "60", *(f"{left} {right}" for left, right in merges)])
    with pytest.raises(TokenizerError, match="more than 256 MiB together"):
        OaBpeTokenizer.from_bytes(lines.encode())
    with pytest.raises(TokenizerError, match="at most"):
        OaBpeTokenizer.from_bytes(b"oa_bpe_v1\n1\n" + b"0 0\n" * 5_000_000)
    with pytest.raises(TokenizerError, match="at most"):
        OaBpeTokenizer([(0, 0)] * (MAX_MERGES + 1))


def test_a_long_chain_of_merges_decodes() -> None:
    count = 5000
    tokenizer = OaBpeTokenizer([(97, 97), *((255 + i, 97) for i in range(1, count))])
    assert tokenizer.decode([255 + count]) == "a" * (count + 1)


@pytest.mark.parametrize("size", [-1, 0, 255, 1 << 21])
def test_impossible_vocabulary_sizes(size: int) -> None:
    with pytest.raises(UsageError, match="256 bytes are part of it"):
        OaBpeTokenizer.train(["some text"], size)


def test_damaged_files_are_refused_or_are_vocabularies() -> None:
    draw = random.Random(0)
    accepted = 0
    for _ in range(400):
        data = bytearray(VOCABULARY)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(data))
            what = draw.randrange(3)
            if what == 0:
                data[place] = draw.choice(b"0123456789 \n\r-+\x00\xff")
            elif what == 1:
                del data[place : place + draw.randrange(1, 5)]
            else:
                data[place:place] = bytes(draw.choices(b"0123456789 \n", k=draw.randrange(1, 5)))
        try:
            tokenizer = OaBpeTokenizer.from_bytes(data)
        except TokenizerError:
            continue
        accepted += 1
        assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
        assert OaBpeTokenizer.from_bytes(tokenizer.to_bytes()).merges == tokenizer.merges
    assert 0 < accepted < 300
