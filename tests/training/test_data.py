"""Files to documents to rows to batches: every target once, nothing across documents, positions that continue exactly."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.text import ByteTokenizer, ChatTemplate, Tokenizer
from oazoo.training.batches import Batch, Batches, one_pass
from oazoo.training.data import Part, everything, load_data, split
from oazoo.training.documents import Documents, DocumentsWriter
from oazoo.training.order import permutation, random_below
from oazoo.training.rows import PackedRows, Rows, Windows, make_rows

USER = {"role": "user", "content": "question"}


def answer(text: str) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": text}]}


def documents_of(*texts: tuple[list[int], list[bool] | None, bool], continuous: bool = False) -> Documents:
    writer = DocumentsWriter()
    writer.begin_file("data", continuous=continuous)
    for number, (ids, targets, whole) in enumerate(texts, 1):
        writer.extend(ids, targets)
        writer.end(line=number, whole=whole)
    return writer.finish()


def pairs(batches: list[Batch]) -> list[tuple[int, int]]:
    """(input, target) of every target that counts, in order."""
    found = []
    for batch in batches:
        assert batch.inputs.dtype == batch.targets.dtype == np.int32 and batch.mask.dtype == np.float32
        assert batch.inputs.shape == batch.targets.shape == batch.mask.shape
        assert set(np.unique(batch.mask)) <= {0.0, 1.0} and batch.tokens == batch.mask.sum()
        rows, columns = np.nonzero(batch.mask)
        assert (rows < batch.samples).all()
        found += [
            (int(batch.inputs[r, c]), int(batch.targets[r, c])) for r, c in zip(rows, columns, strict=True)
        ]
    return found


def text_documents(tmp_path: Path, data: bytes, **options: Any) -> Documents:
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    return load_data([path], ByteTokenizer(), **options)


# ------------------------------------------------------------------------------------------------ running text


@pytest.mark.parametrize("size", [2, 3, 16, 17, 18, 33, 100])
@pytest.mark.parametrize("length", [1, 5, 16])
def test_every_byte_but_the_first_is_a_target_once(tmp_path: Path, size: int, length: int) -> None:
    data = bytes(random.Random(size).choices(range(32, 127), k=size))
    rows = make_rows(everything(text_documents(tmp_path, data)), length)
    assert isinstance(rows, Windows)
    assert pairs(list(one_pass(rows, 3))) == list(pairwise(data))
    assert rows.report.targets == size - 1 and rows.report.rows == -(-(size - 1) // length)


def test_the_last_window_is_filled_up_behind(tmp_path: Path) -> None:
    rows = make_rows(everything(text_documents(tmp_path, b"abcdefg")), 4)
    first, last = one_pass(rows, 1)
    assert first.inputs.tolist() == [[97, 98, 99, 100]] and first.targets.tolist() == [[98, 99, 100, 101]]
    assert last.inputs.tolist() == [[101, 102, 103, 0]] and last.targets.tolist() == [[102, 103, 0, 0]]
    assert last.mask.tolist() == [[1, 1, 0, 0]] and last.tokens == 2


def test_files_of_a_folder_are_documents_with_an_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name, text in (("b.txt", "the b"), ("a.txt", "x"), ("empty.md", "")):
        (tmp_path / name).write_text(text)
    documents = load_data([tmp_path], tokenizer)
    a, b = [120, 302], [257, 32, 98, 302]
    assert [~i if i < 0 else i for i in documents.tokens.tolist()] == a + b
    found = pairs(list(one_pass(make_rows(everything(documents), 8), 1)))
    # The end of each document is learned; what the next one begins with is not.
    assert found == [*pairwise(a), *pairwise(b)]
    assert documents.where(0).endswith("a.txt") and documents.where(1).endswith("b.txt")


def test_pieces_of_a_large_text_are_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr("oazoo.text.files._BLOCK_BYTES", 1000)
    text = "".join(f"line {i} of the text\n" for i in range(400))
    path = tmp_path / "text.txt"
    path.write_text(text, newline="")
    documents = load_data(
        [path], Tokenizer(tokenizer._library.to_str().encode(), bos_id=300, eos_ids=[302], add_bos=True)
    )
    assert len(documents) == 1
    assert [abs(i) if i >= 0 else ~i for i in documents.tokens.tolist()] == [
        300,
        *tokenizer.encode(text),
        302,
    ]


def test_validation_is_the_end_of_the_text(tmp_path: Path) -> None:
    data = bytes(range(32, 126)) * 3
    documents = text_documents(tmp_path, data)
    train, held = split(documents, 0.1)
    assert held.tokens == round(len(data) * 0.1) and train.tokens + held.tokens == len(data)
    seen = pairs(list(one_pass(make_rows(train, 7), 4)))
    other = pairs(list(one_pass(make_rows(held, 7), 4)))
    cut = train.tokens
    assert seen == list(pairwise(data[:cut]))
    assert other == list(pairwise(data[cut:]))
    for wrong in (0, 1, -0.1, float("nan")):
        with pytest.raises(UsageError, match="cannot be held back"):
            split(documents, wrong)
    with pytest.raises(UsageError, match="too few"):
        split(text_documents(tmp_path, b"abc"), 0.5)


def test_shifted_windows_begin_elsewhere_in_each_pass(tmp_path: Path) -> None:
    data = bytes(range(1, 100))
    documents = text_documents(tmp_path, data)
    rows = make_rows(everything(documents), 10, shift=True, seed=5)
    assert rows.count == (98 - 9) // 10
    starts = []
    for epoch in range(20):
        ids, counts = rows.fill(np.arange(rows.count), epoch)
        assert counts[:, 1:].all() and (np.diff(ids) == 1).all() and (ids[1:, 0] == ids[:-1, -1]).all()
        starts.append(int(ids[0, 0]))
        assert rows.where(0, epoch).endswith(f"tokens {starts[-1] - 1} to {starts[-1] + 9}")
    assert len(set(starts)) > 5 and min(starts) >= 1 and max(starts) <= 10
    short = make_rows(everything(text_documents(tmp_path, b"short")), 10, shift=True)
    assert pairs(list(one_pass(short, 1))) == list(pairwise(b"short"))


# ---------------------------------------------------------------------------------------------------- examples


def test_padding_is_masked_by_position_and_the_end_counts(
    tmp_path: Path, tokenizer: Tokenizer, write_lines: Any
) -> None:
    """Rows are filled up with id 0 here; a document may well contain it, and its end token counts once."""
    path = write_lines({"text": "abcd"})
    (batch,) = one_pass(make_rows(everything(load_data([path], tokenizer, eos_id=300)), 8), 1)
    assert batch.targets.tolist() == [[98, 99, 100, 300, 0, 0, 0, 0]]
    assert batch.mask.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    zeros = documents_of(([7, 0, 0, 0], None, False))
    (batch,) = one_pass(make_rows(everything(zeros), 5), 1)
    assert batch.mask.tolist() == [[1, 1, 1, 0, 0]]


def test_an_example_that_just_fits_keeps_its_end(
    tokenizer: Tokenizer, chatml: ChatTemplate, write_lines: Any
) -> None:
    documents = load_data([write_lines(answer("yes"))], tokenizer, template=chatml)
    size = int(documents.lengths()[0])
    (exact,) = one_pass(make_rows(everything(documents), size - 1), 1)
    assert exact.targets[0, -1] == 302 and exact.mask[0, -1] == 1 and exact.tokens == 4
    rows = make_rows(everything(documents), size - 2)
    (cut,) = one_pass(rows, 1)
    assert 302 not in cut.targets[cut.mask > 0] and cut.tokens == 3  # nothing learns to end where it was cut
    assert (rows.report.cut, rows.report.cut_tokens, rows.report.longest) == (1, 1, size)
    assert "1 of 1 examples are longer than" in rows.report.warnings()[0]
    with pytest.raises(UsageError, match=r"data\.jsonl:1: there is nothing to learn in rows of 9 tokens"):
        make_rows(everything(documents), 9)


def test_the_first_target_is_the_first_id_of_the_answer(
    tokenizer: Tokenizer, chatml: ChatTemplate, write_lines: Any
) -> None:
    documents = load_data([write_lines(answer("yes"))], tokenizer, template=chatml)
    (batch,) = one_pass(make_rows(everything(documents), 64), 1)
    where = int(np.flatnonzero(batch.mask[0])[0])
    prompt = tokenizer.encode(chatml.render([USER]))
    assert batch.inputs[0, : where + 1].tolist() == prompt
    assert batch.targets[0, where : where + 4].tolist() == [*b"yes", 302] and batch.tokens == 4


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("length", [4, 16, 64])
def test_packed_rows_hold_every_target_once_and_none_across_documents(pack: bool, length: int) -> None:
    draw = random.Random(length)
    texts: list[tuple[list[int], list[bool] | None, bool]] = []
    wanted = []
    for number in range(60):
        ids = [1000 * number + i for i in range(draw.randrange(1, 40))]
        whole = draw.random() < 0.5
        own = [draw.random() < 0.6 for _ in ids] if whole else None
        texts.append((ids, own, whole))
        limit = length + 1 if whole else len(ids)
        for i in range(1, min(limit, len(ids))):
            if own is None or own[i]:
                wanted.append((ids[i - 1], ids[i]))
    rows = make_rows(everything(documents_of(*texts)), length, pack=pack, seed=3)
    assert isinstance(rows, PackedRows)
    found = pairs(list(one_pass(rows, 7)))
    assert sorted(found) == sorted(wanted) and rows.report.targets == len(wanted)
    assert rows.report.cut == sum(whole and len(ids) > length + 1 for ids, _, whole in texts)
    if not pack:
        for batch in one_pass(rows, 1):
            there = np.flatnonzero(batch.mask[0])
            assert len(set((batch.inputs[0, : there[-1] + 1] // 1000).tolist())) == 1


def test_packing_fills_rows() -> None:
    draw = random.Random(0)
    texts = [(list(range(draw.randrange(5, 60))), None, False) for _ in range(500)]
    part = everything(documents_of(*texts))
    packed, alone = make_rows(part, 128), make_rows(part, 128, pack=False)
    assert packed.report.fill > 0.9 and alone.report.fill < 0.3
    assert alone.count == 500 and packed.report.targets == alone.report.targets


def test_validation_takes_whole_documents_and_equal_ones_together() -> None:
    texts = [([number % 40, 50, 60 + number % 40], None, False) for number in range(100)]
    documents = documents_of(*texts)
    train, held = split(documents, 0.2, seed=1)
    assert train.chosen is not None and held.chosen is not None
    assert sorted([*train.chosen, *held.chosen]) == list(range(100))
    assert 15 <= len(held.chosen) <= 25
    assert not {i % 40 for i in train.chosen} & {i % 40 for i in held.chosen}
    again = split(documents, 0.2, seed=1)[1].chosen
    assert again is not None and again.tolist() == held.chosen.tolist()
    other = split(documents, 0.2, seed=2)[1].chosen
    assert other is not None and other.tolist() != held.chosen.tolist()
    for few in (1, 5):
        with pytest.raises(UsageError, match="cannot be split"):
            split(documents_of(*[([1, 2, 3], None, False)] * few), 0.5)


# ----------------------------------------------------------------------------------------------------- batches


def batches_of(count: int = 23, size: int = 4, **options: Any) -> tuple[Batches, Rows, Documents]:
    documents = documents_of(*(([i, 100 + i], None, False) for i in range(count)))
    rows = make_rows(everything(documents), 2, pack=False)
    return Batches(rows, documents, size, **options), rows, documents


def test_a_pass_visits_each_row_once_in_an_order_of_its_own() -> None:
    batches, _, _ = batches_of(24, 4, seed=9)
    orders = []
    for epoch in range(3):
        assert batches.epoch == epoch
        seen = [int(i) for _ in range(6) for batch in batches.next() for i in batch.inputs[:, 0]]
        assert sorted(seen) == list(range(24))
        orders.append(tuple(seen))
    assert len(set(orders)) == 3
    assert orders[0] != tuple(range(24))
    plain, _, _ = batches_of(24, 4, shuffle=False)
    assert [int(i) for _ in range(6) for i in plain.next()[0].inputs[:, 0]] == list(range(24))


def test_batches_are_full_across_passes() -> None:
    batches, _, _ = batches_of(5, 3, accumulate=2, seed=1)
    seen = [int(i) for _ in range(10) for batch in batches.next() for i in batch.inputs[:, 0]]
    assert len(seen) == 60
    for start in range(0, 60, 5):
        assert sorted(seen[start : start + 5]) == list(range(5))
    assert batches.epoch == 12


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 17])
def test_a_resumed_run_gets_the_same_batches(stop: int) -> None:
    batches, _, _ = batches_of(accumulate=2, seed=7)
    for _ in range(stop):
        batches.next()
    state = json.loads(json.dumps(batches.state()))
    resumed, _, _ = batches_of(accumulate=2, seed=7)
    resumed.restore(state)
    assert resumed.epoch == batches.epoch
    for _ in range(20):
        for one, other in zip(batches.next(), resumed.next(), strict=True):
            assert (one.inputs == other.inputs).all() and (one.targets == other.targets).all()
            assert (one.mask == other.mask).all() and one.where == other.where


def test_a_position_in_other_data_is_refused() -> None:
    state = batches_of(seed=7)[0].state()
    for other in (batches_of(22, seed=7)[0], batches_of(seed=7, shuffle=False)[0]):
        with pytest.raises(UsageError, match="other data"):
            other.restore(state)
    _, _, documents = batches_of()
    with pytest.raises(UsageError, match="other data"):
        Batches(make_rows(everything(documents), 3, pack=False), documents, 4, seed=7).restore(state)
    with pytest.raises(UsageError, match="has the seed 7, not 8"):
        batches_of(seed=8)[0].restore(state)
    for key, value in (
        ("index", 23),
        ("index", -1),
        ("epoch", -1),
        ("index", "1"),
        ("epoch", True),
        ("seed", None),
    ):
        with pytest.raises(FormatError, match="damaged"):
            batches_of(seed=7)[0].restore({**state, key: value})


def test_the_last_batch_of_validation_is_filled_up() -> None:
    _, rows, _ = batches_of(5, 3)
    full, last = one_pass(rows, 3)
    assert (full.samples, full.tokens) == (3, 3) and (last.samples, last.tokens) == (2, 2)
    assert last.inputs.shape == (3, 2) and last.mask[2].sum() == 0
    assert len(list(one_pass(rows, 3, limit=1))) == 1


def test_accumulated_masks_add_up_to_the_big_batch(write_lines: Any, tokenizer: Tokenizer) -> None:
    """Lengths 3, 17, 1 and 9: what is divided by is the number of all targets, not the mean of means."""
    path = write_lines(*({"prompt": "p", "completion": "x" * n} for n in (3, 17, 1, 9)))
    documents = load_data([path], tokenizer)
    rows = make_rows(everything(documents), 32, pack=False)
    one = Batches(rows, documents, 1, accumulate=4, shuffle=False).next()
    (big,) = Batches(rows, documents, 4, shuffle=False).next()
    assert [b.tokens for b in one] == [4, 18, 2, 10] and big.tokens == 34
    assert (np.concatenate([b.mask for b in one]) == big.mask).all()
    assert (np.concatenate([b.inputs for b in one]) == big.inputs).all()


def test_batches_say_where_they_are_from(write_lines: Any, tokenizer: Tokenizer) -> None:
    path = write_lines({"text": "abc"}, "", {"text": "def"})
    documents = load_data([path], tokenizer)
    (batch,) = Batches(make_rows(everything(documents), 8, pack=False), documents, 2, shuffle=False).next()
    assert batch.where == f"{path}:1 and 1 more rows"
    packed = make_rows(everything(documents), 8)
    assert packed.where(0, 0) in (f"{path}:1 and 1 more in its row", f"{path}:3 and 1 more in its row")


# ------------------------------------------------------------------------------------------------------ errors


def test_a_bad_line_is_named(write_lines: Any, tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    good = {"text": "a"}
    for line, message in (
        ("{", "is not JSON"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"text": "a <|im_end|>"}, "applied already"),
        ('{"text": "\\ud83d"}', "lone surrogate"),
    ):
        path = write_lines(*[good] * 5, "", line, good)
        with pytest.raises(OazooError) as caught:
            load_data([path], tokenizer, template=chatml)
        assert str(caught.value).startswith(f"{path}:7: ") and message in str(caught.value)
        assert str(caught.value).count(str(path)) == 1


def test_progress_is_told_while_a_file_is_read(
    write_lines: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lines = write_lines(*({"text": f"line {n}"} for n in range(175)))
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    told: list[tuple[str, int, int | None, str]] = []
    load_data([lines, text], tokenizer, progress=lambda *what: told.append(what))
    done = [done for _, done, _, _ in told]
    size = lines.stat().st_size + text.stat().st_size
    assert len(done) == 5 and done == sorted(set(done)) and done[-1] == size
    assert {total for _, _, total, _ in told} == {size}


def test_line_ends_and_a_byte_order_mark(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    documents = load_data([path], tokenizer)
    assert len(documents) == 2 and documents.where(1) == f"{path}:3"


def test_bad_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one <|mine|>\ntwo\nthree <|im_end|> four\n")
    with pytest.raises(UsageError, match=r"text\.txt:3: has the name of the control token"):
        load_data([path], tokenizer)
    assert load_data([path], tokenizer, special="tokens").tokens.tolist().count(302) == 2
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_data([path], tokenizer)
    path.write_bytes(b"")
    with pytest.raises(UsageError, match=r"text\.txt: there is nothing to learn"):
        load_data([path], tokenizer)
    path.write_bytes(b"a")
    with pytest.raises(UsageError, match="nothing to learn"):
        load_data([path], ByteTokenizer())


def test_senseless_sizes(tmp_path: Path) -> None:
    part = everything(text_documents(tmp_path, b"some text"))
    for length in (0, -1, 1 << 21):
        with pytest.raises(UsageError, match="rows of"):
            make_rows(part, length)
    for size, accumulate in ((0, 1), (1, 0)):
        with pytest.raises(UsageError, match="cannot be"):
            Batches(make_rows(part, 4), part.documents, size, accumulate=accumulate)
    with pytest.raises(UsageError, match="nothing to learn in this part"):
        make_rows(Part(part.documents, 3, 4), 4)


def test_orders_do_not_depend_on_the_version_of_numpy() -> None:
    assert permutation(8, 1, 0).tolist() == [1, 4, 0, 6, 5, 3, 7, 2]
    assert permutation(8, 1, 0).tolist() != permutation(8, 1, 1).tolist() != permutation(8, 2, 1).tolist()
    assert [random_below(1000, 1, epoch) for epoch in range(3)] == [420, 375, 54]
    spread = np.bincount([permutation(16, seed, 3)[0] for seed in range(4000)], minlength=16)
    assert spread.min() > 180 and spread.max() < 320
    assert permutation(0, -5, 0).tolist() == []
