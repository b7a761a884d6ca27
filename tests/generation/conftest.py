"""Two small language models in NumPy, and a byte-level tokenizer with ChatML's control tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from oazoo.text import Tokenizer

Array = npt.NDArray[np.float32]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TinyTransformer:
    """One attention layer with learned positions and a residual, random weights; keys and values are cached."""

    def __init__(self, vocab_size: int, max_positions: int = 256, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        width = 32
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.embed = rng.normal(size=(vocab_size, width))
        self.positions = rng.normal(size=(max_positions, width))
        self.q, self.k, self.v, self.o = (rng.normal(size=(width, width)) / 5 for _ in range(4))
        self.head = rng.normal(size=(width, vocab_size))
        self.sessions: list[TinySession] = []

    def new_session(self, max_tokens: int) -> TinySession:
        assert 1 <= max_tokens <= self.max_positions
        self.sessions.append(TinySession(self, max_tokens))
        return self.sessions[-1]

    def logits(self, ids: npt.NDArray[np.int32]) -> Array:
        x = self.embed[ids] + self.positions[: len(ids)]
        scores = (x @ self.q) @ (x @ self.k).T
        scores[np.triu_indices(len(ids), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        y = x + weights @ (x @ self.v) @ self.o
        result: Array = (y @ self.head).astype(np.float32)
        return result


class TinySession:
    """Counts what it is fed, so that tests can see how much was read."""

    def __init__(self, model: TinyTransformer, room: int) -> None:
        self.model, self.room = model, room
        self.keys: list[npt.NDArray[np.float64]] = []
        self.values: list[npt.NDArray[np.float64]] = []
        self.fed = 0
        self.closed = 0

    @property
    def position(self) -> int:
        return len(self.keys)

    def prefill(self, ids: npt.NDArray[np.int32]) -> Array:
        assert ids.dtype == np.int32 and len(ids) >= 1
        return [self.decode(int(i)) for i in ids][-1]

    def decode(self, token_id: int) -> Array:
        assert not self.closed and self.position < self.room
        m = self.model
        x = m.embed[token_id] + m.positions[self.position]
        self.keys.append(x @ m.k)
        self.values.append(x @ m.v)
        self.fed += 1
        scores = np.array(self.keys) @ (x @ m.q)
        weights = np.exp(scores - scores.max())
        y = x + (weights / weights.sum()) @ np.array(self.values) @ m.o
        result: Array = (y @ m.head).astype(np.float32)
        return result

    def truncate(self, position: int) -> None:
        assert 0 <= position <= self.position
        del self.keys[position:], self.values[position:]

    def close(self) -> None:
        self.closed += 1


class Reciting:
    """A model that knows one text by heart: after ``start`` tokens of anything it gives ``script``, again and
    again.
    """

    def __init__(self, vocab_size: int, start: int, script: Sequence[int], max_positions: int = 256) -> None:
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.start, self.script = start, list(script)
        self.sessions: list[RecitingSession] = []
        self.fail_at = -1
        self.failure: BaseException | None = None

    def new_session(self, max_tokens: int) -> RecitingSession:
        self.sessions.append(RecitingSession(self))
        return self.sessions[-1]

    def after(self, fed: int) -> Array:
        logits = np.zeros(self.vocab_size, np.float32)
        if fed == self.fail_at and self.failure is not None:
            raise self.failure
        logits[self.script[(fed - self.start) % len(self.script)]] = np.nan if fed == self.fail_at else 9.0
        return logits

    def logits(self, ids: npt.NDArray[np.int32]) -> Array:
        return np.stack([self.after(n + 1) for n in range(len(ids))])


class RecitingSession:
    def __init__(self, model: Reciting) -> None:
        self.model, self.position, self.closed = model, 0, 0

    def prefill(self, ids: npt.NDArray[np.int32]) -> Array:
        self.position += len(ids)
        return self.model.after(self.position)

    def decode(self, token_id: int) -> Array:
        return self.prefill(np.array([token_id], np.int32))

    def truncate(self, position: int) -> None:
        self.position = position

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["Hello world, the end of the world. user assistant system"] * 3, trainer)
    return Tokenizer(library.to_str().encode(), bos_id=1, eos_ids=[2])


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML


@pytest.fixture
def transformer(tokenizer: Tokenizer) -> TinyTransformer:
    return TinyTransformer(tokenizer.vocab_size)


@pytest.fixture
def recite(tokenizer: Tokenizer) -> Callable[..., Reciting]:
    """``recite(start, ids)``: a model that gives these ids after ``start`` tokens."""
    return lambda start, script, **more: Reciting(tokenizer.vocab_size, start, script, **more)


@pytest.fixture(scope="session")
def transformer_of() -> Callable[[int], TinyTransformer]:
    """A tiny transformer for a vocabulary of a given size."""
    return TinyTransformer
