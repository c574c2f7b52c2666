"""Where a package index keeps a wheel, on the index that pip on this machine is told to use.

Indexes speak JSON (PEP 691) or HTML (PEP 503). Settings come from pip's variables and files, so a
company's mirror, its certificates and its password serve here as they do for packages.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

from tokamak.checkpoint.download import Http, without_password

log = logging.getLogger(__name__)

PUBLIC_INDEX = "https://pypi.org/simple"

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"

MAX_PAGE_BYTES = 64 << 20

PIP_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Which indexes pip would ask."""

    indexes: tuple[str, ...]
    """Base URLs, in order."""
    find_links: tuple[str, ...]
    """Folders or pages with wheels."""
    http: Http


@dataclass(frozen=True, slots=True)
class WheelPlace:
    """A wheel that can be fetched."""

    url: str
    sha256: str | None


def read_settings(environment: Mapping[str, str] = os.environ) -> IndexSettings:
    """Pip's settings for this environment; the public index if it has none of its own."""
    settings = _pip_config()
    settings |= {
        name[4:].lower().replace("_", "-"): value
        for name, value in environment.items()
        if name.startswith("PIP_") and value
    }
    indexes: list[str] = []
    if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes.append(settings.get("index-url", PUBLIC_INDEX))
        indexes += settings.get("extra-index-url", "").split()
    certificates = settings.get("cert") or environment.get("REQUESTS_CA_BUNDLE")
    return IndexSettings(
        indexes=tuple(indexes),
        find_links=tuple(settings.get("find-links", "").split()),
        http=Http(certificates if certificates and Path(certificates).is_file() else None),
    )


def find_wheel(package: str, filename: str, settings: IndexSettings) -> WheelPlace | None:
    """The first place that has the wheel `filename` of `package`, or None."""
    for place in settings.find_links:
        folder = Path(url2pathname(urlsplit(place).path) if place.startswith("file:") else place)
        if (folder / filename).is_file():
            return WheelPlace((folder / filename).resolve().as_uri(), None)
    for index in settings.indexes:
        page = f"{index.rstrip('/')}/{package}/"
        try:
            with settings.http.open(page, {"Accept": ACCEPT}) as response:
                text = response.read(MAX_PAGE_BYTES).decode("utf-8", errors="replace")
                kind, base = response.headers.get_content_type(), response.url or page
            files = _json_files(text) if kind.endswith("json") else _html_files(text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.info("%s does not list %s: %s", without_password(page), package, error)
            continue
        for link, sha256 in files:
            url = urljoin(base, link)
            if unquote(urlsplit(url).path).rpartition("/")[2] == filename:
                return WheelPlace(_with_password_of(page, url), sha256)
    return None


def _pip_config() -> dict[str, str]:
    """Pip's own settings by name; empty where there is no pip."""
    command = [sys.executable, "-m", "pip", "--no-input", "config", "list"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.info("pip's settings cannot be read: %s", error)
        return {}
    found: dict[str, str] = {}
    for section in ("global", "install", "download"):
        for line in done.stdout.splitlines():
            match = re.fullmatch(rf"{section}\.([a-z-]+)=(['\"])(.*)\2", line)
            if match is not None:
                found[match[1]] = match[3].replace("\\n", " ")
    return found


def _json_files(text: str) -> list[tuple[str, str | None]]:
    listed: list[dict[str, Any]] = json.loads(text)["files"]
    return [(file["url"], (file.get("hashes") or {}).get("sha256")) for file in listed]


def _html_files(text: str) -> list[tuple[str, str | None]]:
    page = _Links()
    page.feed(text)
    files: list[tuple[str, str | None]] = []
    for link in page.links:
        url, fragment = urldefrag(link)
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        files.append((url, sha256))
    return files


class _Links(HTMLParser):
    """The targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _with_password_of(page: str, url: str) -> str:
    """`url` with the password of the index, if it is on the same host."""
    credentials, at, host = urlsplit(page).netloc.rpartition("@")
    parts = urlsplit(url)
    if at and parts.netloc == host:
        return parts._replace(netloc=f"{credentials}@{host}").geturl()
    return url
