"""How one file comes over the network: resumed where an earlier try broke off, checked at the end."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import ssl
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tokamak.errors import ModelNotFoundError

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18

TRIES = 5

TIMEOUT_S = 60.0

RETRY_WAIT_S = 1.0
"""Before the second try; doubled before each one after it."""

PERMANENT_STATUSES = (401, 403, 404, 410)
"""Answers that another try will not change."""


@dataclass(frozen=True, slots=True)
class Http:
    """How to reach servers: a certificate file other than the system's, or None."""

    certificates: str | None = None

    def open(self, url: str, headers: dict[str, str]) -> Any:
        """An open response. A name and password in the URL are sent as basic authentication.

        Raises:
            OSError: the server cannot be reached or refuses.
        """
        parts = urlsplit(url)
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers = headers | {"Authorization": f"Basic {b64encode(secret.encode()).decode()}"}
            url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        request = urllib.request.Request(url, headers=headers)
        secure = parts.scheme == "https"
        context = ssl.create_default_context(cafile=self.certificates) if secure else None
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)
        except urllib.error.HTTPError as refusal:
            refusal.close()
            raise


def without_password(url: str) -> str:
    """A URL that may be shown."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def download(url: str, target: Path, *, sha256: str | None, progress: bool, http: Http) -> None:
    """Fetch `url` into `target`. What arrived is kept in `target`.part, so a later call goes on there.

    Raises:
        ModelNotFoundError: the server refuses, cannot be reached, or sends other bytes than expected.
    """
    part = target.with_name(target.name + ".part")
    last: Exception | None = None
    for attempt in range(TRIES):
        if attempt:
            time.sleep(RETRY_WAIT_S * 2 ** (attempt - 1))
        try:
            _fetch(url, part, progress=progress, http=http)
        except (OSError, HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code in PERMANENT_STATUSES:
                last = error
                break
            log.warning("%s broke off and is tried again: %s", without_password(url), error)
            last = error
            continue
        if sha256 is None or sha256_of(part) == sha256:
            os.replace(part, target)
            return
        part.unlink()
        last = ValueError(f"its SHA-256 is not {sha256}")
    raise ModelNotFoundError(
        f"{without_password(url)} could not be fetched: {last}",
        hint="check the network and try again; what has arrived is kept",
    ) from last


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(url: str, part: Path, *, progress: bool, http: Http) -> None:
    """Fetch what is missing of `part`."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = http.open(url, headers)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        # Nothing follows what we have: it is all there, or it is no part of this file.
        total = (error.headers.get("Content-Range") or "").rpartition("/")[2]
        if total != str(have):
            part.unlink()
            raise OSError(f"{part} has {have} bytes, the file {total or 'fewer'}") from error
        return
    with response:
        resumed = have > 0 and _starts_at(response, have)
        left = response.headers.get("Content-Length")
        done = have if resumed else 0
        total = done + int(left) if left else None
        with (
            _bar(progress, url, done, total) as advance,
            part.open("ab" if resumed else "wb") as file,
        ):
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                advance(len(chunk))
    if total is not None and done != total:
        raise OSError(f"it ended after {done} of {total} bytes")


def _starts_at(response: Any, have: int) -> bool:
    """Whether the server honoured our range; else it sends the file from its start."""
    content_range = response.headers.get("Content-Range") or ""
    return response.status == 206 and content_range.startswith(f"bytes {have}-")


@contextlib.contextmanager
def _bar(progress: bool, url: str, done: int, total: int | None) -> Iterator[Any]:
    """A progress bar on the terminal; yields a function that takes the bytes of each chunk."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not progress) as bar:
        name = urlsplit(url).path.rpartition("/")[2]
        task = bar.add_task(unquote(name), total=total, completed=done)
        yield lambda count: bar.advance(task, count)
