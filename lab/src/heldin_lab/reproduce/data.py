"""The paper's datasets: where they come from, and that they are what they should be.

Datasets live in folders of their own (`mnist`, `sector`) of a data folder: the one given, else
HELDIN_DATA, else the user's cache. Every file is checked whenever it is read, so that a damaged one
is never used, and nothing is downloaded or unpacked past the size that it may have.

The SHA-256 of every file is known here, but for SECTOR's, whose publisher gives none. Of these, the
first copy that has the right form (rows, labels, features) is written down beside it
(`sector.scale.bz2.sha256`), and no other one is taken from then on. Who has a copy that they trust
writes that note themselves, before the first download.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import http.client
import io
import itertools
import os
import re
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heldin.errors import HeldinError
from heldin.state.files import replacing

__all__ = ["DATASETS", "Sector", "fetch", "folder", "mnist", "require", "sector", "wdbc"]

CLASSES, FEATURES = 105, 55_197  # of SECTOR
LABEL = re.compile(rb"[1-9]\d{0,2}")
CELL = re.compile(rb"([1-9]\d{0,5}):-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class File:
    """A packed file of a dataset.

    Attributes:
        name: of the file; its ending tells how it is packed.
        sha256: of the unpacked bytes. None where none is published.
        rows: lines of the unpacked file, for text in the format of LIBSVM.
        classes: labels, from 1 on, each of which has rows; None if some may have none.
        limit: bytes that it may have, packed and unpacked.
    """

    name: str
    sha256: str | None = None
    rows: int | None = None
    classes: int | None = None
    limit: int = 64 << 20

    def unpack(self, packed: bytes, sha256: str | None = None) -> bytes:
        """The contents; an error that says what is wrong if they are not what they should be."""
        source = io.BytesIO(packed)
        try:
            with bz2.open(source) if self.name.endswith("bz2") else gzip.open(source) as file:
                raw = file.read(self.limit + 1)
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise HeldinError(f"{self.name} is truncated or damaged: {error}") from error
        if len(raw) > self.limit:
            raise HeldinError(f"{self.name} has other contents: more than {self.limit} bytes")
        known = self.sha256 or sha256
        found = hashlib.sha256(raw).hexdigest()
        if known is not None and found != known:
            raise HeldinError(f"{self.name} has other contents: SHA-256 {found}, not {known}")
        if known is None and self.rows is not None:
            self._check_form(raw.splitlines())
        return raw

    def _check_form(self, lines: list[bytes]) -> None:
        if len(lines) != self.rows:
            raise HeldinError(f"{self.name} has {len(lines)} rows, not {self.rows}")
        labels = set()
        for number, line in enumerate(lines, 1):
            label, *cells = line.split() or [b""]
            pairs = [CELL.fullmatch(cell) for cell in cells]
            features = [0, *(int(pair[1]) for pair in pairs if pair), FEATURES + 1]
            rising = all(a < b for a, b in itertools.pairwise(features))
            if not (LABEL.fullmatch(label) and all(pairs) and rising):
                raise HeldinError(
                    f"{self.name} has other contents: row {number} is no label and features of "
                    f"SECTOR, rising from 1 to {FEATURES}"
                )
            labels.add(int(label))
        if labels and max(labels) > CLASSES:
            raise HeldinError(f"{self.name} has other contents: labels beyond 1 to {CLASSES}")
        if self.classes is not None and len(labels) != self.classes:
            raise HeldinError(f"{self.name} has rows of {len(labels)} labels, not {self.classes}")


@dataclass(frozen=True)
class Dataset:
    """A dataset's files and the addresses that have them, tried in turn."""

    files: tuple[File, ...]
    addresses: tuple[str, ...]


DATASETS = {
    "mnist": Dataset(
        (
            File(
                "train-images-idx3-ubyte.gz",
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
    ),
    "sector": Dataset(
        (
            File("sector.scale.bz2", rows=6412, classes=CLASSES),
            File("sector.t.scale.bz2", rows=3207),
        ),
        ("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/sector/",),
    ),
}
# A published part of SECTOR in another split, used in the place of the official files by the quick
# preset if it is there: training rows, test rows.
SECTOR_PART = (
    File("sector.test.bz2", "46cd4b40da063824ed6fd7d23221bdff8b5b211fe36c5e84fabc0920608d60ec"),
    File("sector.heldout.bz2", "ec9aa2a07e6bf62fdad0b8ef2013d770a3c27decac8a14f54a9ccb6a8626e09d"),
)


def folder(data: str | Path | None = None) -> Path:
    """Where datasets are: as given, else HELDIN_DATA, else the cache."""
    given = data or os.environ.get("HELDIN_DATA")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "heldin"


def fetch(
    name: str,
    data: str | Path | None = None,
    *,
    addresses: Sequence[str] | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> Path:
    """Download a dataset's files, except for those that are there and sound.

    A file gets its name only after its contents were checked.

    Args:
        name: "mnist" or "sector".
        data: the data folder, see `folder`.
        addresses: where to look (default: the official places).
        tell: gets a line for each file.

    Returns:
        The dataset's folder.
    """
    if name not in DATASETS:
        raise HeldinError(f"data fetch: unknown dataset {name!r}; known are {', '.join(DATASETS)}")
    target = folder(data) / name
    for file in DATASETS[name].files:
        try:
            _read(target, file)
        except HeldinError:
            _download(file, target, addresses or DATASETS[name].addresses)
            said = "downloaded and checked"
        else:
            said = "already there"
        tell(f"{target / file.name}: {said}{_write_down(target, file)}")
    return target


def _download(file: File, target: Path, addresses: Iterable[str]) -> None:
    reasons, known = [], _noted(target, file)
    for address in addresses:
        url = address.rstrip("/") + "/" + file.name
        try:
            packed = _answer(url, file.limit)
            file.unpack(packed, known)
        except (OSError, http.client.HTTPException, HeldinError) as error:
            reasons.append(f"{url}: {error}")
            continue
        try:
            target.mkdir(parents=True, exist_ok=True)
            with replacing(target / file.name) as part:
                part.write_bytes(packed)
        except OSError as error:
            raise HeldinError(
                f"data fetch: cannot write to {target}: {error}; give another folder with --data "
                "or HELDIN_DATA"
            ) from error
        return
    if known is not None:
        note = _note(target, file)
        reasons.append(f"{note} has {known}; remove it if that is no longer the right one")
    raise HeldinError(f"data fetch: no address gave {file.name}. " + "; ".join(reasons))


def _answer(url: str, limit: int) -> bytes:
    """What a web address answers, if it is no longer than the limit."""
    if not url.startswith(("https://", "http://")):
        raise HeldinError("neither https nor http")
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # nosec B310
        check_redirect(url, answer.geturl())
        packed: bytes = answer.read(limit + 1)
    if len(packed) > limit:
        raise HeldinError(f"more than {limit} bytes")
    return packed


def check_redirect(asked: str, led: str) -> None:
    """Refuse to be led from https to something else."""
    if asked.startswith("https://") and not led.startswith("https://"):
        raise HeldinError(f"led to {led}, which is not https")


def _note(where: Path, file: File) -> Path:
    """Where the checksum of a first copy is written down, if none is published."""
    return where / f"{file.name}.sha256"


def _noted(where: Path, file: File) -> str | None:
    """What is written down, by us or by `bunzip2 -c FILE | sha256sum`."""
    note = _note(where, file)
    if file.sha256 is not None or not note.is_file():
        return None
    found = re.match(rb"[0-9a-fA-F]{64}(?=\s|$)", note.read_bytes())
    if found is None:
        raise HeldinError(
            f"{note} does not begin with a SHA-256 (64 hexadecimal digits): write that of a copy "
            "which you trust, or remove the file to take the next copy on its form"
        )
    return found[0].decode().lower()


def _write_down(where: Path, file: File) -> str:
    """Write down the checksum of the first copy; what there is to say of that."""
    if file.sha256 is not None or _noted(where, file) is not None:
        return ""
    found = hashlib.sha256(_read(where, file)).hexdigest()
    try:
        with replacing(_note(where, file)) as part:
            part.write_text(found + "\n")
    except OSError as error:
        return f"; no SHA-256 is published, and its own, {found}, cannot be written down: {error}"
    return f"; no SHA-256 is published, so its own is kept to from now on, {found}"


def _read(where: Path, file: File) -> bytes:
    """The checked contents of a file."""
    packed = where / file.name
    if not packed.is_file():
        raise HeldinError(f"{packed} is not there")
    try:
        return file.unpack(packed.read_bytes(), _noted(where, file))
    except HeldinError as error:
        raise HeldinError(f"{error} ({packed})") from error


def _read_or_say(name: str, data: str | Path | None, file: File) -> bytes:
    """The checked contents of a file of a dataset; else an error that says what to do."""
    try:
        return _read(folder(data) / name, file)
    except HeldinError as error:
        raise HeldinError(
            f"{error}: run `heldin-lab data fetch {name}`, or give a folder that has {name}/ with "
            "--data or HELDIN_DATA"
        ) from error


def require(name: str, data: str | Path | None = None, *, part: bool = True) -> str:
    """Say which files will be used if a dataset is there and sound; else an error: what to do.

    Args:
        name: "mnist" or "sector".
        data: the data folder, see `folder`.
        part: whether the part of SECTOR will do.
    """
    files = _sector_files(data, part) if name == "sector" else DATASETS[name].files[:2]
    for file in files:
        _read_or_say(name, data, file)
    note = " (a part of SECTOR, in another split than the paper's)" if files == SECTOR_PART else ""
    return " and ".join(file.name for file in files) + note


def mnist(data: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """MNIST's 60,000 training images, (60000, 784) bytes, and their labels."""
    images, labels = (_read_or_say("mnist", data, f) for f in DATASETS["mnist"].files[:2])
    x = torch.frombuffer(bytearray(images), dtype=torch.uint8, offset=16).reshape(-1, 784)
    return x, torch.frombuffer(bytearray(labels), dtype=torch.uint8, offset=8).long()


@dataclass(frozen=True)
class Sector:
    """SECTOR: sparse rows (scipy CSR) and labels from 0, and whether it is only a part."""

    x: Any
    y: Tensor
    test_x: Any
    test_y: Tensor
    part: bool


def _sector_files(data: str | Path | None, part: bool) -> tuple[File, ...]:
    official = DATASETS["sector"].files
    where = folder(data) / "sector"
    if part and not (where / official[0].name).exists():
        if all((where / file.name).exists() for file in SECTOR_PART):
            return SECTOR_PART
    return official


def sector(data: str | Path | None = None, *, part: bool = True) -> Sector:
    """SECTOR, or its part if only that is there and `part` allows it."""
    from sklearn.datasets import load_svmlight_file

    files = _sector_files(data, part)
    tables, answers = [], []
    for file in files:
        raw = _read_or_say("sector", data, file)
        try:
            x, y = load_svmlight_file(io.BytesIO(raw), n_features=FEATURES, dtype="float32")
        except ValueError as error:
            raise HeldinError(f"{file.name} has other contents: {error}") from error
        labels = torch.tensor(y).long() - 1
        if int(labels.min()) < 0 or int(labels.max()) >= CLASSES:
            raise HeldinError(f"{file.name} has other contents: labels beyond 1 to {CLASSES}")
        tables.append(x)
        answers.append(labels)
    return Sector(tables[0], answers[0], tables[1], answers[1], part=files == SECTOR_PART)


def wdbc() -> tuple[Tensor, Tensor]:
    """The Wisconsin breast cancer data that scikit-learn brings, (569, 30), and labels 0 and 1."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    return torch.tensor(bunch.data).double(), torch.tensor(bunch.target).double()
