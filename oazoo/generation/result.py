"""What a generation gives besides its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: ``eos``: the model ended its answer; ``stop``: a stop text came; ``length``: max_tokens were made, or the
#: context is full; ``cancelled``: someone stopped it.
FinishReason = Literal["eos", "stop", "length", "cancelled"]


@dataclass(slots=True)
class Timings:
    """Wall-clock seconds: loading the model, reading the prompt, start to first token, and all decode steps."""

    load_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens read per second (0 when none were)."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode steps per second; the first token comes with the prompt and is not one (0 when there were
        none).
        """
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(slots=True)
class GenerationResult:
    """A finished (or cancelled) generation.

    ``text`` is the answer without stop text and control tokens; ``token_ids`` are all ids that were chosen, a
    final end token left out; ``prompt_tokens`` counts the prompt, ``reused_tokens`` how many of them were
    still in the cache.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "cancelled"
    prompt_ids: list[int] = field(default_factory=list)
    reused_tokens: int = 0
    seed: int = 0
    stop: str | None = None
    timings: Timings = field(default_factory=Timings)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_ids)
