"""Running a causal language model token by token: prompts in chunks, decoding by replay of a captured step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from oazoo.errors import GenerationError
from oazoo.models.cache import Cache
from oazoo.models.sequences import Context, Sequences
from oazoo.nn.dropout import Dropout
from oazoo.nn.module import Buffer, Module, ModuleList, Parameter
from oazoo.nn.moe import Mixture, RouteStatistics
from oazoo.runtime import Device, Program, Tensor
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.loss import cross_entropy
from oazoo.runtime.tape import by_rows, checkpoint

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

Watch = Callable[[str, Tensor], None]

#: Tokens of a prompt that go through the layers together. More would not be faster, and takes more memory.
CHUNK = 256
#: Logits computed at a time when those of every position are wanted: bounds what the vocabulary multiplies.
_HEAD_ROWS = 64
#: Logits of :meth:`CausalModel.loss` that are held at a time.
_LOSS_LOGITS = 1 << 25
#: Shapes of batches whose tables stay on the device.
_KEPT_SHAPES = 8


class Layer(Module):
    """One layer of a causal model."""

    @abstractmethod
    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream after this layer, f32 [tokens, hidden]."""


class CausalModel(Module):
    """A causal language model on a device. Subclasses give the layers; this gives sessions and logits.

    Attributes:
        vocab_size: number of logits.
        max_positions: longest sequence.
        device: where the weights are.
        layers: what ``hidden`` runs through, each called with the residual stream and the cache, or a batch.
        checkpointing: whether :meth:`forward` keeps nothing inside layers and computes it again on the way back.
    """

    vocab_size: int
    max_positions: int
    device: Device
    layers: ModuleList[Layer]
    checkpointing = False

    @property
    def used_vocab_size(self) -> int:
        """How many of the logits are of tokens; those behind them, if any, fill up a table and are never chosen."""
        return self.vocab_size

    @property
    def constant_state(self) -> bool:
        """Whether a sequence takes the same memory however long it is."""
        return False

    @abstractmethod
    def new_cache(self, capacity: int) -> Cache:
        """A cache for one sequence of up to ``capacity`` tokens."""

    @abstractmethod
    def new_sequences(self, batch: int, tokens: int) -> Sequences:
        """What layers are told about a batch of ``batch`` sequences of ``tokens`` tokens."""

    @abstractmethod
    def embed_tokens(self, ids: Tensor, context: Context) -> Tensor:
        """The residual stream before the first layer, f32 [tokens, hidden], of ``ids`` (i32 [tokens])."""

    @abstractmethod
    def head_logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: f32 [rows, hidden] to [rows, vocab_size]."""

    def hidden(self, ids: Tensor, cache: Cache, watch: Watch | None = None) -> Tensor:
        """The residual stream after the last layer, f32 [tokens, hidden].

        ``ids`` is i32 [tokens]; the first of them stands where ``cache`` is. ``watch`` is told the output of the
        embedding and of every layer, with its name.
        """
        x = self.embed_tokens(ids, cache)
        if watch is not None:
            watch("embed", x)
        for index, layer in enumerate(self.layers):
            x = layer(x, cache)
            if watch is not None:
                watch(f"layers.{index}", x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of whole sequences at once, without a cache; under a tape, with gradients.

        Args:
            ids: i32, u32 or u8 [batch, tokens]; an id outside the vocabulary gives NaN.

        Returns:
            f32 [batch · tokens, vocab_size]: the logits that follow each token.

        Raises:
            GenerationError: ids of another shape, or more tokens than the model has positions.
        """
        return self.head_logits(self.sequence_hidden(ids))

    def loss(
        self, ids: Tensor, targets: Tensor, *, mask: Tensor | None = None, count: float | None = None
    ) -> Tensor:
        """The cross-entropy of :meth:`forward`'s logits; those of a large vocabulary are computed some rows at a time.

        In training, losses of routers that were asked for (:meth:`set_router_losses`) are added.

        Args:
            ids: i32, u32 or u8 [batch, tokens].
            targets: i32, u32 or u8 [batch · tokens]; one outside the vocabulary gives NaN.
            mask: f32 [batch · tokens] that each token's loss is multiplied by, or None.
            count: what the sum is divided by; the number of tokens if None.

        Returns:
            f32 [1], nats a token.
        """
        hidden = self.sequence_hidden(ids)
        loss = self._cross_entropy(hidden, targets, mask, count)
        for mixture in self.mixtures():
            if mixture.loss is not None:
                loss = add(loss, mixture.loss)
        return loss

    def _cross_entropy(
        self, hidden: Tensor, targets: Tensor, mask: Tensor | None, count: float | None
    ) -> Tensor:
        rows = hidden.shape[0]
        count = rows if count is None else count
        size = max(4, _LOSS_LOGITS // self.vocab_size // 4 * 4)  # bytes as targets start at multiples of four
        if rows <= size:
            return cross_entropy(self.head_logits(hidden), targets, mask=mask, count=count)

        def some(part: Tensor, start: int, stop: int) -> Tensor:
            masked = None if mask is None else mask.rows(start, stop)
            return cross_entropy(self.head_logits(part), targets.rows(start, stop), mask=masked, count=count)

        return by_rows(some, hidden, size)

    def sequence_hidden(self, ids: Tensor) -> Tensor:
        """The residual stream of :meth:`forward` after the last layer, f32 [batch · tokens, hidden]."""
        if len(ids.shape) != 2 or not ids.numel or ids.shape[1] > self.max_positions:
            raise GenerationError(
                f"ids must be [batch, tokens] with 1 to {self.max_positions} tokens, not {list(ids.shape)}"
            )
        losses = any(m.training and (m.balance or m.z) for m in self.mixtures())
        if losses and self.checkpointing:
            raise GenerationError("losses of routers do not go with checkpointing: switch one of them off")
        context = self._sequences_of(*ids.shape)
        x = self.embed_tokens(ids.view(ids.numel), context)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(partial(layer, context=context), x)
            else:
                x = layer(x, context)
        return x

    def _sequences_of(self, batch: int, tokens: int) -> Sequences:
        kept: dict[tuple[int, int], Sequences] = self.__dict__.setdefault("_kept_sequences", {})
        found = kept.pop((batch, tokens), None)
        if found is None:
            with self.device.aside():
                found = self.new_sequences(batch, tokens)
        kept[batch, tokens] = found  # the last used is at the end, and the first goes
        if len(kept) > _KEPT_SHAPES:
            del kept[next(iter(kept))]
        return found

    def mixtures(self) -> list[Mixture]:
        """The mixtures of experts in it, from the first layer to the last."""
        return [module for module in self.modules() if isinstance(module, Mixture)]

    def set_router_losses(self, *, balance: float = 0.0, z: float = 0.0) -> None:
        """Add losses of the routers to :meth:`loss` in training (:func:`oazoo.runtime.ops.routing.router_loss`).

        They are computed inside layers, so they do not go with :attr:`checkpointing`.
        """
        for mixture in self.mixtures():
            mixture.balance, mixture.z = balance, z

    def count_routes(self, wanted: bool = True) -> None:
        """Count the loads of experts from now on, or no more; programs that were captured before stay as they are."""
        for mixture in self.mixtures():
            mixture.counting = wanted

    def route_statistics(self) -> list[RouteStatistics]:
        """How busy experts were since counting began, a mixture each; waits for the device."""
        return [mixture.statistics() for mixture in self.mixtures()]

    def update_routing_bias(self, rate: float) -> None:
        """Let routers favour experts that had less than the mean load (:meth:`oazoo.nn.moe.Mixture.update_routing_bias`)."""
        for mixture in self.mixtures():
            mixture.update_routing_bias(rate)

    def set_dropout(self, rate: float) -> None:
        """The rate at which embeddings and the outputs of sublayers are dropped in training, where a model has that."""
        for module in self.modules():
            if isinstance(module, Dropout):
                module.rate = rate

    def first_nonfinite(self, ids: npt.ArrayLike) -> str | None:
        """Where a run over ``ids`` [tokens] first goes bad: the step whose output has a NaN or an infinity, or None.

        Runs the layers one by one with every output read back: for finding a fault, not for use.
        """
        array = np.asarray(ids, np.int32)
        check_ids(array, self.used_vocab_size)
        cache = self.new_cache(array.size)
        found: list[str] = []

        def watch(step: str, output: Tensor) -> None:
            values = output.numpy()
            bad = values.size - int(np.isfinite(values).sum())
            if bad and not found:
                row = int(np.argmin(np.isfinite(values).all(axis=1)))
                found.append(f"{step}: {bad} of {values.size} values, the first at position {row}")

        hidden = self.hidden(Tensor.from_numpy(self.device, array), cache, watch)
        watch("head", self.head_logits(hidden))
        return found[0] if found else None

    def new_session(self, max_tokens: int) -> DeviceSession:
        """An empty session with room for ``max_tokens`` tokens.

        Raises:
            GenerationError: more than the model has positions for.
            DeviceError: no device memory for the cache.
        """
        if not 1 <= max_tokens <= self.max_positions:
            raise GenerationError(
                f"a session of {max_tokens} tokens; this model has {self.max_positions} positions"
            )
        return DeviceSession(self, max_tokens)

    def close(self) -> None:
        """Give the weights' device memory back; the model cannot be used afterwards, its open sessions neither."""
        self.load(_released)

    def logits(self, ids: npt.ArrayLike) -> Logits:
        """Logits after each token.

        Args:
            ids: int [tokens], or [batch, tokens]: each row is a sequence of its own.

        Returns:
            float32 [tokens, vocab_size] or [batch, tokens, vocab_size].

        Raises:
            GenerationError: no tokens, ids outside the vocabulary, or more tokens than positions.
        """
        array = np.asarray(ids)
        if array.ndim not in (1, 2) or array.dtype.kind not in "iu" or not array.size:
            raise GenerationError(
                f"ids must be integers [tokens] or [batch, tokens], at least one; not {array.dtype}{list(array.shape)}"
            )
        rows = np.atleast_2d(array)
        check_ids(rows, self.used_vocab_size)
        result = np.empty((*rows.shape, self.vocab_size), np.float32)
        for i, row in enumerate(rows):
            session = self.new_session(row.size)
            session.all_logits(row.astype(np.int32), result[i])
            session.close()
        return result.reshape(*array.shape, self.vocab_size)


def _released(name: str, held: Parameter | Buffer) -> tuple[Tensor, ...]:
    return ()


def check_ids(ids: npt.NDArray[np.integer], vocab_size: int) -> None:
    """Raise a GenerationError for an id outside the vocabulary."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise GenerationError(
            f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab_size}"
        )


class DeviceSession:
    """One sequence: its cache, and the captured step that decodes one token.

    Logits come back as float32 [used_vocab_size] arrays of their own.
    """

    def __init__(self, model: CausalModel, max_tokens: int) -> None:
        self._model = model
        self._cache: Cache | None = model.new_cache(max_tokens)
        self._position = 0
        self._step: tuple[Program, Tensor, Tensor] | None = None

    @property
    def position(self) -> int:
        """Number of tokens fed so far."""
        return self._position

    def _open(self, more: int) -> Cache:
        if self._cache is None:
            raise GenerationError("this session is closed")
        if self._position + more > self._cache.capacity:
            raise GenerationError(
                f"this session has room for {self._cache.capacity} tokens; {self._position} are fed and {more} more came"
            )
        return self._cache

    def prefill(self, ids: Ids) -> Logits:
        """Feed ``ids`` [n ≥ 1]; the logits that follow the last.

        A prompt of one token goes through the captured step, like decoding.
        """
        ids = np.asarray(ids, np.int32)
        if ids.size == 1:
            found = self.decode(int(ids[0]))
            self._open(0).keep(self._position)
            return found
        last: Tensor | None = None
        for _, hidden in self.feed(ids):
            last = hidden
        self._open(0).keep(self._position)
        assert last is not None
        rows = last.shape[0]
        result: Logits = self._model.head_logits(last.rows(rows - 1, rows)).numpy()[0]
        return result[: self._model.used_vocab_size]

    def feed(self, ids: Ids) -> Iterator[tuple[int, Tensor]]:
        """Feed ``ids`` [n ≥ 1] in chunks of at most ``CHUNK``.

        Yields for each chunk the index of its first token in ``ids``, and the residual stream after the last layer, f32
        [tokens, hidden]; :meth:`CausalModel.head_logits` of any of its rows are the logits that follow that token.
        """
        cache = self._open(ids.size)
        check_ids(ids, self._model.used_vocab_size)
        for start in range(0, ids.size, CHUNK):
            chunk = ids[start : start + CHUNK]
            cache.begin_at(self._position)
            hidden = self._model.hidden(Tensor.from_numpy(self._model.device, chunk), cache)
            self._position += chunk.size
            yield start, hidden

    def all_logits(self, ids: Ids, out: Logits) -> None:
        """Feed ``ids`` and write the logits after each into ``out`` [n, vocab_size]."""
        for start, hidden in self.feed(ids):
            for row in range(0, hidden.shape[0], _HEAD_ROWS):
                part = hidden.rows(row, min(row + _HEAD_ROWS, hidden.shape[0]))
                out[start + row : start + row + part.shape[0]] = self._model.head_logits(part).numpy()

    def decode(self, token_id: int) -> Logits:
        """Feed one token; the logits that follow it. The step is captured once and replayed."""
        cache = self._open(1)
        check_ids(np.array([token_id]), self._model.used_vocab_size)
        if self._step is None:
            self._step = self._capture(cache)
        program, token, logits = self._step
        token.write(np.array([token_id], np.int32))
        cache.begin_at(self._position)
        program.run()
        self._position += 1
        result: Logits = logits.numpy()[0]
        return result[: self._model.used_vocab_size]

    def _capture(self, cache: Cache) -> tuple[Program, Tensor, Tensor]:
        token = Tensor.empty(self._model.device, (1,), "i32")
        with self._model.device.capture() as program:
            logits = self._model.head_logits(self._model.hidden(token, cache))
        return program, token, logits

    def truncate(self, position: int) -> None:
        """Forget everything from ``position`` on.

        A model whose state has a fixed size goes back to the last prompt's end before it, or to the beginning;
        :attr:`position` tells.
        """
        if not 0 <= position <= self._position:
            raise GenerationError(f"cannot go back to position {position} from {self._position}")
        if position < self._position:
            self._position = self._open(0).back_to(position)

    def close(self) -> None:
        """Give the device memory back."""
        self._step = None
        self._cache = None
