"""Models on the Hugging Face Hub.

What a repository holds is asked of the Hub with its own client (``huggingface_hub``; ``HF_ENDPOINT``,
``HF_TOKEN`` and ``hf auth login`` work as usual). The client's own download starts again from zero after an
interruption, so the files are brought by :mod:`oazoo.zoo.download`, which checks them against the sha256 (or
git hash) that the Hub states.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oazoo import __version__
from oazoo.errors import PullError
from oazoo.formats.gguf_split import all_parts
from oazoo.formats.messages import some
from oazoo.zoo.cards import CardFile
from oazoo.zoo.download import RemoteFile, download
from oazoo.zoo.progress import Progress
from oazoo.zoo.refs import HubRef, check_relative
from oazoo.zoo.sources import Fetched, Resolved, Source, only_pickles, refuse_pickle
from oazoo.zoo.store import StoredFile, make_key
from oazoo.zoo.web import HttpStatusError, default_client, pause

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

#: Seconds for one question to the Hub. A refused or unknown host answers at once; a silent one costs this
#: once.
_TIMEOUT = 5.0
_ATTEMPTS = 3
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
#: What goes with the weights: configuration and tokenizer.
_COMPANIONS = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "chat_template.json",
        "LICENSE",
        "LICENSE.txt",
        "LICENSE.md",
    }
)


class HubSource(Source):
    """A Hugging Face repository, or one file of it. ``files``, if any, are the only ones taken (from a card)."""

    label = "huggingface"

    def __init__(self, ref: HubRef, files: Sequence[CardFile] = ()) -> None:
        if ref.file is not None:  # any part of a split GGUF stands for all of them
            ref = replace(ref, file=all_parts(ref.file)[0])
        self.ref = ref
        self.source = ref.public
        self.requested = ref.revision
        self.pinned = ref.pinned
        self._files = tuple(files)

    def resolve(self) -> Resolved:
        """Ask the Hub for the commit and the files of the revision."""
        info = _model_info(self.ref)
        commit = info.sha
        if not isinstance(commit, str) or len(commit) != 40 or set(commit) - set("0123456789abcdef"):
            raise PullError(f"the Hub states no commit for {self.ref.repo}; is HF_ENDPOINT a Hub?")
        listed: dict[str, _Listed] = {}
        for sibling in info.siblings or []:
            try:
                name = check_relative(str(sibling.rfilename))
            except ValueError as error:
                raise PullError(f"{self.ref.repo} lists an {error}; nothing of it is fetched") from None
            lfs: Any = sibling.lfs
            sha256 = getattr(lfs, "sha256", None) if lfs is not None else None
            git_sha1 = sibling.blob_id if lfs is None else None
            listed[name] = _Listed(sibling.size, sha256, git_sha1)
        return _ResolvedHub(
            key=make_key("hf", *self.ref.public.removeprefix("hf:").split("/"), commit[:12]),
            source=self.source,
            requested=self.requested,
            revision=commit,
            ref=self.ref,
            commit=commit,
            listed=listed,
            stated=self._files,
            license=_license_of(info),
        )


@dataclass(frozen=True, slots=True)
class _Listed:
    size: int | None
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class _ResolvedHub(Resolved):
    key: str
    source: str
    requested: str | None
    revision: str | None
    ref: HubRef
    commit: str
    listed: Mapping[str, _Listed]
    stated: tuple[CardFile, ...]
    license: str | None

    def fetch(self, into: Path, progress: Progress) -> Fetched:
        names = self._choose(into, progress)
        stated = {file.path: file for file in self.stated}
        files = []
        for name in names:
            remote = self._remote(name, stated.get(name))
            try:
                digest = download(remote, into / name, default_client(), progress, label=Path(name).name)
            except HttpStatusError as error:
                code, message = error.headers.get("X-Error-Code"), error.headers.get("X-Error-Message")
                raise PullError(_explain(self.ref, error.status, code, message, error.retry_after)) from None
            refuse_pickle(into / name)
            files.append(StoredFile(name, (into / name).stat().st_size, digest))
        return Fetched(into, tuple(files), license=self.license)

    def _choose(self, into: Path, progress: Progress) -> list[str]:
        """The files to take: weights in the best form that there is, with configuration and tokenizer."""
        if self.stated:
            return [file.path for file in self.stated]
        if self.ref.file is not None:
            return self._parts(self.ref.file)
        root = [name for name in self.listed if "/" not in name]
        tensors = sorted(name for name in root if name.endswith(".safetensors"))
        ggufs = sorted({all_parts(name)[0] for name in self.listed if name.endswith(".gguf")})
        if "model.safetensors" in tensors:
            weights = ["model.safetensors"]
        elif _INDEX in root:
            weights = [_INDEX, *self._shards(into, progress)]
        elif len(tensors) == 1:
            weights = tensors
        elif not tensors and len(ggufs) == 1:
            return self._parts(ggufs[0])
        else:
            raise PullError(self._why_not(tensors or ggufs))
        return weights + sorted(name for name in root if name in _COMPANIONS)

    def _parts(self, file: str) -> list[str]:
        """A file, or all parts of the GGUF model that it is the first of."""
        names = all_parts(file)
        missing = [name for name in names if name not in self.listed]
        if len(names) == 1 and missing:
            raise PullError(f"{self.ref.repo} has no file {file!r} at {self.commit[:12]}")
        if missing:
            raise PullError(
                f"{self.ref.repo} has {len(names) - len(missing)} of the {len(names)} parts of {file} at "
                f"{self.commit[:12]}; it lacks {some(missing)}. Nothing was fetched"
            )
        return names

    def _shards(self, into: Path, progress: Progress) -> list[str]:
        """The shard files that the index names."""
        path = into / _INDEX
        download(self._remote(_INDEX, None), path, default_client(), progress)
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise PullError(f"{_INDEX} of {self.ref.repo} is larger than {_MAX_INDEX_BYTES} bytes")
        try:
            mapping = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in mapping.values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise PullError(f"{_INDEX} of {self.ref.repo} is no index of weights") from None
        missing = [name for name in names if name not in self.listed or "/" in name]
        if missing or not names:
            raise PullError(
                f"{_INDEX} of {self.ref.repo} names files that it lacks: {', '.join(missing[:3])}"
            )
        return names

    def _why_not(self, candidates: list[str]) -> str:
        if candidates:
            some = ", ".join(candidates[:8]) + (" …" if len(candidates) > 8 else "")
            return f"{self.ref.repo} has several sets of weights; name one, as in {self.source}/FILE: {some}"
        pickles = only_pickles(list(self.listed))
        if pickles:
            return (
                f"{self.ref.repo} has only pickled weights ({pickles[0]}), which can run code when they are read. "
                "Look for a safetensors or GGUF version of it, or let the Hub's converter make one"
            )
        return f"{self.ref.repo} has no weights in safetensors or GGUF form"

    def _remote(self, name: str, stated: CardFile | None) -> RemoteFile:
        hub = _client()

        listed = self.listed.get(name, _Listed(None, None, None))
        if stated is not None and stated.sha256 is not None:
            if listed.sha256 not in (None, stated.sha256):
                raise PullError(f"{name}: the Hub states sha256 {listed.sha256}, the card {stated.sha256}")
            listed = _Listed(stated.size or listed.size, stated.sha256, None)
        elif listed.sha256 is None and listed.git_sha1 is None:
            listed = _ask_for(self.ref, name, self.commit)
        return RemoteFile(
            path=name,
            url=hub.hf_hub_url(self.ref.repo, name, revision=self.commit, endpoint=_endpoint()),
            identity=f"hf:{self.ref.repo}/{name}@{self.commit[:12]}",
            size=listed.size,
            sha256=listed.sha256,
            git_sha1=listed.git_sha1,
            headers=_headers(),
        )


# ------------------------------------------------------------------------------------------- the Hub's client


def _client() -> Any:
    """The module ``huggingface_hub``, imported such that it tells the Hub nothing about the machine.

    By default the client asks the Hub for a list to recognise its caller by, before anything else: one more
    request, and seconds of waiting where the Hub does not answer. It reads the switch for that once, when it
    is imported.
    """
    switch = "HF_HUB_DISABLE_TELEMETRY"
    if "huggingface_hub.constants" in sys.modules or switch in os.environ:
        return importlib.import_module("huggingface_hub")
    os.environ[switch] = "1"
    try:
        importlib.import_module("huggingface_hub.constants")
        return importlib.import_module("huggingface_hub")
    finally:
        del os.environ[switch]


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _headers() -> dict[str, str]:
    """The client's headers: user agent and, if the user has one, the token."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers: dict[str, str] = build_hf_headers(library_name="oazoo", library_version=__version__)
    return headers


def _model_info(ref: HubRef) -> ModelInfo:
    api = _client().HfApi(endpoint=_endpoint(), library_name="oazoo", library_version=__version__)

    def ask() -> ModelInfo:
        info: ModelInfo = api.model_info(
            ref.repo, revision=ref.revision, files_metadata=True, timeout=_TIMEOUT
        )
        return info

    found: ModelInfo = _asking(ref, ask)
    return found


def _ask_for(ref: HubRef, name: str, commit: str) -> _Listed:
    """Size and hash of one file from the headers that the Hub sends for it (for mirrors that list names only)."""
    hub = _client()

    url = hub.hf_hub_url(ref.repo, name, revision=commit, endpoint=_endpoint())
    headers = _headers()
    found: Any = _asking(
        ref, lambda: hub.get_hf_file_metadata(url, timeout=_TIMEOUT, headers=headers, endpoint=_endpoint())
    )
    etag = found.etag if isinstance(found.etag, str) and not set(found.etag) - set("0123456789abcdef") else ""
    return _Listed(found.size, etag if len(etag) == 64 else None, etag if len(etag) == 40 else None)


def _asking(ref: HubRef, ask: Any) -> Any:
    """Call the Hub's client; what goes wrong becomes one of our messages. Only a reached Hub is asked again."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    for attempt in range(_ATTEMPTS):
        try:
            return ask()
        except HfHubHTTPError as error:
            status, headers = error.response.status_code, error.response.headers
            again = status in (408, 429, 500, 502, 503, 504) and attempt + 1 < _ATTEMPTS
            wait = headers.get("Retry-After", "")
            seconds = float(wait) if wait.isdecimal() and len(wait) < 7 else None
            if not again or not pause(attempt, seconds):
                code, message = headers.get("X-Error-Code"), headers.get("X-Error-Message")
                raise PullError(_explain(ref, status, code, message, seconds)) from None
        except OfflineModeIsEnabled:
            raise PullError("HF_HUB_OFFLINE is set") from None
        except HFValidationError as error:
            raise PullError(f"{ref.repo!r} is no repository name: {error}") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PullError(
                f"the Hub's answer about {ref.repo} makes no sense ({type(error).__name__})"
            ) from error
        except Exception as error:
            # The client's HTTP library changed its name between versions (httpx, httpx2): told by class name.
            kinds = {kind.__name__ for kind in type(error).__mro__}
            if "TransportError" not in kinds:
                raise
            # A host that refuses or stays silent is not worth more time: there may be another source.
            silent = any(kind.endswith("Timeout") for kind in kinds)
            if silent or kinds & {"ConnectError", "ProxyError"} or attempt + 1 == _ATTEMPTS:
                raise PullError(f"cannot reach the Hub ({_reason(error, kinds)})") from None
            pause(attempt)
    raise AssertionError("unreachable")


def _reason(error: Exception, kinds: Iterable[str]) -> str:
    if any(kind.endswith("Timeout") for kind in kinds):
        return "timed out"
    text = str(error).strip() or type(error).__name__
    return text.split("] ", 1)[1] if text.startswith("[Errno") and "] " in text else text


def _explain(
    ref: HubRef, status: int, code: str | None, message: str | None, retry_after: float | None
) -> str:
    """What an error status of the Hub means for the user. The token itself is never part of it."""
    has_token = bool(_client().get_token())
    login = "set HF_TOKEN or run 'hf auth login'"
    if code == "GatedRepo":
        if status == 401 or not has_token:
            return f"{ref.repo} is gated and no token was given: accept its license on its page on the Hub, then {login}"
        return f"{ref.repo} is gated and its license is not accepted for your account: accept it on its page on the Hub"
    if code == "RevisionNotFound":
        return f"{ref.repo} has no revision {ref.revision or 'main'!r}"
    if code == "EntryNotFound":
        return f"{ref.repo} lacks a file that it lists"
    if status == 401 and has_token and code != "RepoNotFound":
        return "the Hub refuses your token (HF_TOKEN, or that of 'hf auth login'): it is wrong or has expired"
    if status == 401 and not has_token:
        return f"there is no public repository {ref.repo}; if it is private, {login}"
    if status in (401, 404):
        return f"there is no repository {ref.repo}" + (" that your token may see" if has_token else "")
    if status == 403:
        return (
            f"your token does not permit reading {ref.repo}"
            if has_token
            else f"{ref.repo} needs a token: {login}"
        )
    if status == 429:
        when = f" for {retry_after:.0f} s" if retry_after is not None else ""
        return f"the Hub takes no more requests from here{when}; try later" + (
            "" if has_token else f", or {login}"
        )
    return f"the Hub answers {status}" + (f" ({message})" if message else "")


def _license_of(info: ModelInfo) -> str | None:
    """The license that the repository's card names."""
    for tag in info.tags or []:
        if isinstance(tag, str) and tag.startswith("license:"):
            return tag.removeprefix("license:") or None
    data = info.card_data
    stated = data.get("license") if data is not None else None
    return stated if isinstance(stated, str) and stated else None
