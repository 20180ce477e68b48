"""Datasets: fetched, checked, and refused if they are not what they should be."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from heldin import HeldinError
from heldin_lab.cli.main import main
from heldin_lab.reproduce import data as _data
from heldin_lab.reproduce import fetch

RAW = {"a.gz": b"first" * 1000, "b.bz2": b"1 2:0.5\n2 3:0.25\n"}
PACKED = {"a.gz": gzip.compress(RAW["a.gz"]), "b.bz2": bz2.compress(RAW["b.bz2"])}


class Server:
    """What it answers, by path, with a length that may be a lie; and what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[bytes, int]] = {}
        self.asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self.asked.append(handler.path)
                body, length = self.answers.get(handler.path, (b"", -1))
                handler.send_response(404 if length < 0 else 200)
                handler.send_header("Content-Length", str(max(length, 0)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/"

    def give(self, where: str, name: str, body: bytes, length: int | None = None) -> None:
        self.answers[f"/{where}/{name}"] = (body, len(body) if length is None else length)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=partial(found.http.serve_forever, poll_interval=0.01))
    thread.start()
    yield found
    found.http.shutdown()
    found.http.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def dataset(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """A dataset "small" of two files: one with a checksum, one with a number of rows."""
    files = (
        _data.File("a.gz", hashlib.sha256(RAW["a.gz"]).hexdigest(), limit=6000),
        _data.File("b.bz2", rows=2, classes=2),
    )
    places = (f"{server.address}one/", f"{server.address}two")
    monkeypatch.setitem(_data.DATASETS, "small", _data.Dataset(files, places))


def serve(server: Server, where: str = "one") -> None:
    for name, packed in PACKED.items():
        server.give(where, name, packed)


def test_fetch(server: Server, tmp_path: Path) -> None:
    serve(server)
    lines: list[str] = []
    folder = fetch("small", tmp_path, tell=lines.append)
    assert folder == tmp_path / "small"
    note = (folder / "b.bz2.sha256").read_text()  # no checksum is published
    assert note == hashlib.sha256(RAW["b.bz2"]).hexdigest() + "\n"
    assert {name: (folder / name).read_bytes() for name in PACKED} == PACKED
    assert len(list(folder.iterdir())) == 3
    said = [line.split(": ")[1].split(";")[0] for line in lines]
    assert said == ["downloaded and checked"] * 2
    assert "is published" not in lines[0]
    assert lines[1].endswith(f"so its own is kept to from now on, {note.strip()}")
    assert server.asked == ["/one/a.gz", "/one/b.bz2"]


def test_what_is_there_is_kept_and_what_is_damaged_is_not(server: Server, tmp_path: Path) -> None:
    serve(server)
    fetch("small", tmp_path)
    (tmp_path / "small" / "a.gz").write_bytes(PACKED["a.gz"][:-9])
    server.asked.clear()
    lines: list[str] = []
    fetch("small", tmp_path, tell=lines.append)
    assert server.asked == ["/one/a.gz"]
    assert (tmp_path / "small" / "a.gz").read_bytes() == PACKED["a.gz"]
    assert lines[1].endswith("already there")


def flipped(packed: bytes) -> bytes:
    at = len(packed) // 2
    return packed[:at] + bytes([packed[at] ^ 0xFF]) + packed[at + 1 :]


BAD = {
    "cut connection": (PACKED["a.gz"][:-20], len(PACKED["a.gz"])),
    "truncated file": (PACKED["a.gz"][:-20], None),
    "flipped byte": (flipped(PACKED["a.gz"]), None),
    "other contents": (gzip.compress(b"else"), None),
    "no such format": (b"<html>moved</html>", None),
    "nothing": (b"", None),
    "a longer answer": (PACKED["a.gz"] + bytes(6000), None),
    "a file that unpacks to much more": (gzip.compress(bytes(1 << 24), 9), None),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_download_is_never_used(server: Server, tmp_path: Path, kind: str) -> None:
    serve(server)
    server.give("one", "a.gz", *BAD[kind])
    with pytest.raises(HeldinError, match=r"no address gave a\.gz.*one/a\.gz: .*two/a\.gz: .*404"):
        fetch("small", tmp_path)
    assert not list(tmp_path.rglob("*a.gz*"))
    server.give("two", "a.gz", PACKED["a.gz"])  # the next address is tried
    fetch("small", tmp_path)
    assert (tmp_path / "small" / "a.gz").read_bytes() == PACKED["a.gz"]


UNLIKE = {  # what a file of two rows and two labels must not be, and what is said of it
    "truncated": (PACKED["b.bz2"][:-4], "truncated or damaged"),
    "flipped byte": (flipped(PACKED["b.bz2"]), "truncated or damaged"),
    "a row less": (bz2.compress(b"1 2:0.5\n"), "1 rows, not 2"),
    "an empty row": (bz2.compress(b"1 2:0.5\n\n"), "row 2 is no label"),
    "a page": (bz2.compress(b"<html>\n</html>\n"), "row 1 is no label"),
    "no value": (bz2.compress(b"1 2:0.5\n2 3:\n"), "row 2 is no label"),
    "no number": (bz2.compress(b"1 2:0.5\n2 3:nan\n"), "row 2 is no label"),
    "a feature twice": (bz2.compress(b"1 2:0.5\n2 3:1 3:1\n"), "row 2 is no label"),
    "a feature too far": (bz2.compress(b"1 55198:0.5\n2 3:1\n"), "row 1 is no label"),
    "a label too far": (bz2.compress(b"1 2:0.5\n106 3:1\n"), "labels beyond 1 to 105"),
    "a label less": (bz2.compress(b"1 2:0.5\n1 3:1\n"), "rows of 1 labels, not 2"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_file_without_a_published_checksum(server: Server, tmp_path: Path, kind: str) -> None:
    serve(server)
    body, reason = UNLIKE[kind]
    server.give("one", "b.bz2", body)
    with pytest.raises(HeldinError, match=rf"no address gave b.*b\.bz2: b\.bz2 .*{reason}"):
        fetch("small", tmp_path)
    assert not list(tmp_path.rglob("*b.bz2*"))


def test_the_first_download_without_a_published_checksum_is_kept_to(
    server: Server, tmp_path: Path
) -> None:
    serve(server)
    fetch("small", tmp_path)
    other = bz2.compress(RAW["b.bz2"].replace(b"5", b"6"))  # as many rows
    (tmp_path / "small" / "b.bz2").write_bytes(other)
    server.give("one", "b.bz2", other)
    with pytest.raises(HeldinError, match=r"no address gave b\.bz2.*SHA-256.*sha256 has .*remove"):
        fetch("small", tmp_path)
    (tmp_path / "small" / "b.bz2.sha256").unlink()
    fetch("small", tmp_path)
    assert (tmp_path / "small" / "b.bz2").read_bytes() == other


@pytest.mark.parametrize("end", ["", "\n", "  -\n"])
def test_a_checksum_that_the_user_knows_is_kept_to_from_the_first_download_on(
    server: Server, tmp_path: Path, end: str
) -> None:
    """As `bunzip2 -c FILE | sha256sum` writes it, too."""
    serve(server)
    note = tmp_path / "small" / "b.bz2.sha256"
    note.parent.mkdir()
    note.write_text(hashlib.sha256(b"another").hexdigest() + end)
    with pytest.raises(HeldinError, match=r"b\.bz2 has other contents: SHA-256 .*, not "):
        fetch("small", tmp_path)
    assert not (tmp_path / "small" / "b.bz2").exists()
    known = hashlib.sha256(RAW["b.bz2"]).hexdigest().upper() + end
    note.write_text(known)
    lines: list[str] = []
    fetch("small", tmp_path, tell=lines.append)
    assert lines[1].endswith("b.bz2: downloaded and checked")
    assert note.read_text() == known


@pytest.mark.parametrize("text", ["", "md5", "0" * 63, "0" * 65, "g" * 64])
def test_a_note_that_is_no_checksum(server: Server, tmp_path: Path, text: str) -> None:
    serve(server)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "b.bz2.sha256").write_text(text)
    with pytest.raises(HeldinError, match=r"b\.bz2\.sha256 does not begin with a SHA-256"):
        fetch("small", tmp_path)


def test_a_copy_that_was_brought_along(server: Server, tmp_path: Path) -> None:
    """Its checksum is written down, too, if it has the right form."""
    serve(server)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "b.bz2").write_bytes(PACKED["b.bz2"])
    lines: list[str] = []
    fetch("small", tmp_path, tell=lines.append)
    assert "already there; no SHA-256 is published" in lines[1]
    assert (tmp_path / "small" / "b.bz2.sha256").exists()
    fetch("small", tmp_path, tell=lines.append)
    assert lines[3].endswith("already there")
    (tmp_path / "small" / "b.bz2.sha256").unlink()
    (tmp_path / "small" / "b.bz2.sha256").mkdir()  # which cannot be replaced by a file
    fetch("small", tmp_path, tell=lines.append)
    assert "cannot be written down" in lines[5]


def test_nothing_but_the_web(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(PACKED["a.gz"])
    with pytest.raises(HeldinError, match="neither https nor http"):
        fetch("small", tmp_path / "data", addresses=[tmp_path.as_uri()])


def test_https_leads_to_https() -> None:
    _data.check_redirect("https://a.org/x", "https://b.org/x")
    _data.check_redirect("http://a.org/x", "http://b.org/x")
    with pytest.raises(HeldinError, match="which is not https"):
        _data.check_redirect("https://a.org/x", "http://b.org/x")


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(HeldinError, match=r"no address gave a\.gz.*refused"):
        fetch("small", tmp_path, addresses=["http://127.0.0.1:9/"])


def test_a_folder_that_is_a_file(server: Server, tmp_path: Path) -> None:
    serve(server)
    (tmp_path / "small").write_text("")
    with pytest.raises(HeldinError, match=r"cannot write to .*--data"):
        fetch("small", tmp_path)


def test_unknown_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "fetch", "cifar"]) == 2
    assert capsys.readouterr().err == (
        "heldin-lab: data fetch: unknown dataset 'cifar'; known are mnist, sector, small\n"
    )


def test_command(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve(server)
    assert main(["data", "fetch", "small", "--data", str(tmp_path / "given")]) == 0
    assert (tmp_path / "given" / "small" / "b.bz2").exists()
    monkeypatch.setenv("HELDIN_DATA", str(tmp_path / "named"))
    assert main(["data", "fetch", "small"]) == 0
    assert (tmp_path / "named" / "small" / "b.bz2").exists()
    monkeypatch.delenv("HELDIN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["data", "fetch", "small"]) == 0
    assert (tmp_path / "cache" / "heldin" / "small" / "b.bz2").exists()
    assert capsys.readouterr().out.count("downloaded and checked") == 6


def test_official_addresses() -> None:
    names = [file.name for file in _data.DATASETS["sector"].files]
    assert names == ["sector.scale.bz2", "sector.t.scale.bz2"]
    assert all(len(file.sha256 or "") == 64 for file in _data.DATASETS["mnist"].files)
    sector = _data.DATASETS["sector"]
    assert [(file.rows, file.classes) for file in sector.files] == [(6412, 105), (3207, None)]
    assert all(address.startswith("https://") for address in sector.addresses)  # no checksums
    for dataset in ("mnist", "sector"):
        safe = [a.startswith("https://") for a in _data.DATASETS[dataset].addresses]
        assert safe[0]
        assert safe == sorted(safe, reverse=True)  # https first
    assert len(_data.DATASETS["mnist"].files) == 4


# --- reading ---------------------------------------------------------------------------------


def test_require_says_what_to_do(tmp_path: Path) -> None:
    for name in ("mnist", "sector"):
        with pytest.raises(
            HeldinError, match=f"not there: run `heldin-lab data fetch {name}`"
        ) as told:
            _data.require(name, tmp_path)
        assert "\n" not in str(told.value)
        assert "HELDIN_DATA" in str(told.value)


def test_damaged_copies_are_refused(tmp_path: Path) -> None:
    file = _data.DATASETS["mnist"].files[0]
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / file.name).write_bytes(gzip.compress(b"not the digits"))
    with pytest.raises(
        HeldinError, match=r"has other contents: SHA-256 .*heldin-lab data fetch mnist"
    ):
        _data.require("mnist", tmp_path)
    with pytest.raises(HeldinError, match=r"has other contents.*heldin-lab data fetch mnist"):
        _data.mnist(tmp_path)


def test_sector_labels_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    files = (_data.File("sector.scale.bz2", rows=1), _data.File("sector.t.scale.bz2", rows=1))
    monkeypatch.setitem(_data.DATASETS, "sector", _data.Dataset(files, ()))
    (tmp_path / "sector").mkdir()
    for raw, reason in ((b"106 1:0.5\n", "labels beyond"), (b"1 55198:0.5\n", "other contents")):
        for file in files:
            (tmp_path / "sector" / file.name).write_bytes(bz2.compress(raw))
        with pytest.raises(HeldinError, match=reason):  # by its form
            _data.sector(tmp_path)
        for file in files:  # a checksum stands for the form
            note = hashlib.sha256(raw).hexdigest()
            (tmp_path / "sector" / f"{file.name}.sha256").write_text(note)
        with pytest.raises(HeldinError, match=reason):
            _data.sector(tmp_path)
        for file in files:
            (tmp_path / "sector" / f"{file.name}.sha256").unlink()


def test_the_part_of_sector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in for the official files, unless these are there or are asked for."""
    pytest.importorskip("sklearn")
    part = tuple(_data.File(file.name) for file in _data.SECTOR_PART)
    monkeypatch.setattr(_data, "SECTOR_PART", part)
    official = (_data.File("sector.scale.bz2", rows=1), _data.File("sector.t.scale.bz2", rows=1))
    monkeypatch.setitem(_data.DATASETS, "sector", _data.Dataset(official, ()))
    (tmp_path / "sector").mkdir()
    for file in part:
        (tmp_path / "sector" / file.name).write_bytes(bz2.compress(b"3 1:0.5 55197:0.25\n"))
    found = _data.sector(tmp_path)
    assert found.part
    assert found.x.shape == (1, _data.FEATURES)
    assert found.y.tolist() == [2]
    assert "a part of SECTOR" in _data.require("sector", tmp_path)
    with pytest.raises(HeldinError, match="fetch sector"):
        _data.require("sector", tmp_path, part=False)
    for file in official:
        (tmp_path / "sector" / file.name).write_bytes(bz2.compress(b"4 1:0.5\n"))
    assert not _data.sector(tmp_path).part
    assert _data.require("sector", tmp_path) == "sector.scale.bz2 and sector.t.scale.bz2"


def test_wdbc() -> None:
    pytest.importorskip("sklearn")
    x, y = _data.wdbc()
    assert x.shape == (569, 30)
    assert sorted(y.unique().tolist()) == [0.0, 1.0]


@pytest.mark.skipif("HELDIN_DATA" not in os.environ, reason="HELDIN_DATA names no data folder")
def test_real_data() -> None:
    pytest.importorskip("sklearn")
    x, y = _data.mnist()
    assert x.shape == (60_000, 784)
    assert torch.bincount(y).tolist()[:3] == [5923, 6742, 5958]
    found = _data.sector()
    assert found.x.shape[1] == _data.FEATURES
    norms = torch.tensor(found.x.multiply(found.x).sum(1)).flatten()
    torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-3, rtol=0)
