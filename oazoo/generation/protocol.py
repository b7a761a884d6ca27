"""What generation needs of a model. The ready models fulfil it; so can anything else."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class Session(Protocol):
    """One sequence in the making: the model's memory (such as a KV cache) of the tokens fed so far.

    The room is fixed when the session is made; feeding more tokens than that is an error.
    """

    @property
    def position(self) -> int:
        """Number of tokens fed so far."""
        ...

    def prefill(self, ids: Ids) -> Logits:
        """Feed ``ids`` [n ≥ 1] after what is there already; the logits [vocab_size] that follow the last."""
        ...

    def decode(self, token_id: int) -> Logits:
        """Feed one token; the logits [vocab_size] that follow it."""
        ...

    def truncate(self, position: int) -> None:
        """Forget everything from ``position`` on (0 ≤ position ≤ the current one).

        A model that cannot go back to every place goes back further; :attr:`position` tells where it is then.
        """
        ...

    def close(self) -> None:
        """Give the memory back. The session cannot be used afterwards; closing twice does nothing."""
        ...


class LanguageModel(Protocol):
    """A causal language model over token ids."""

    @property
    def vocab_size(self) -> int:
        """Number of logits. Ids are 0 … vocab_size - 1."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest sequence the model can have, prompt and answer together."""
        ...

    def new_session(self, max_tokens: int) -> Session:
        """An empty session with room for ``max_tokens`` tokens (1 ≤ max_tokens ≤ max_positions)."""
        ...

    def logits(self, ids: Ids) -> Logits:
        """Logits [tokens, vocab_size] after each of ``ids`` [tokens], read as a sequence of its own."""
        ...
