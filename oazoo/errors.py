"""The errors of oazoo: one base class, one subclass for each part a user can tell apart.

A message says what went wrong, where (file, tensor, offset, option), and what to do about it. The command line prints
the message and exits with ``exit_code``; a library user catches :class:`OazooError`.
"""

from __future__ import annotations


class OazooError(Exception):
    """Base class of every error that oazoo raises on purpose."""

    #: Exit status of the command line: 1 for failure, 2 for misuse.
    exit_code = 1


class UsageError(OazooError):
    """The request itself cannot be meant: a bad option, an unknown name, an output that exists."""

    exit_code = 2


class FormatError(OazooError):
    """A file is damaged, truncated, hostile, or not of the container it claims to be."""


class TranslationError(OazooError):
    """A source cannot be translated: unknown architecture, a missing or unexpected tensor, an unsupported feature."""


class DeviceError(OazooError):
    """No usable Vulkan device, a device limit, out of device memory, or a lost device."""


class PullError(OazooError):
    """A model could not be fetched or verified."""


class TokenizerError(OazooError):
    """A tokenizer or chat template is missing, unknown or broken."""


class GenerationError(OazooError):
    """A prompt or a generation setting cannot be used with this model."""


class OutputError(OazooError):
    """An output cannot be written: missing or read-only folder, full disk, a target that is not a file."""
