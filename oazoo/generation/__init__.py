"""Generation: sampling, the token loop, and the model that takes and gives text."""

from __future__ import annotations

from oazoo.generation.chat_session import ChatSession
from oazoo.generation.engine import TextStream
from oazoo.generation.protocol import LanguageModel, Session
from oazoo.generation.result import FinishReason, GenerationResult, Timings
from oazoo.generation.sampling import Sampler, SamplingSettings
from oazoo.generation.text_model import TextModel

__all__ = [
    "ChatSession",
    "FinishReason",
    "GenerationResult",
    "LanguageModel",
    "Sampler",
    "SamplingSettings",
    "Session",
    "TextModel",
    "TextStream",
    "Timings",
]
