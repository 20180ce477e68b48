"""The paper's datasets: where they come from, and that they are what they should be.

Datasets live in folders of their own (`mnist`, `sector`) of a data folder: the one given, else
HELDIN_DATA, else the user's cache. Every file is checked whenever it is read, so that a damaged one
is never used.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import http.client
import io
import os
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


@dataclass(frozen=True)
class File:
    """A packed file of a dataset.

    Attributes:
        name: of the file; its ending tells how it is packed.
        md5: of the unpacked bytes. None where none is published: the checksums inside the packed
            file and the number of rows have to do.
        rows: lines of the unpacked file, for text.
    """

    name: str
    md5: str | None = None
    rows: int | None = None

    def unpack(self, packed: bytes) -> bytes:
        """The contents; an error that says what is wrong if they are not what they should be."""
        try:
            raw = bz2.decompress(packed) if self.name.endswith("bz2") else gzip.decompress(packed)
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise HeldinError(f"{self.name} is truncated or damaged: {error}") from error
        if self.md5 is not None:
            found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
            if found != self.md5:
                raise HeldinError(f"{self.name} has other contents: MD5 {found}, not {self.md5}")
        rows = len(raw.splitlines())
        if self.rows is not None and rows != self.rows:
            raise HeldinError(f"{self.name} has {rows} rows, not {self.rows}")
        return raw


@dataclass(frozen=True)
class Dataset:
    """A dataset's files and the addresses that have them, tried in turn."""

    files: tuple[File, ...]
    addresses: tuple[str, ...]


DATASETS = {
    "mnist": Dataset(
        (
            File("train-images-idx3-ubyte.gz", "6bbc9ace898e44ae57da46a324031adb"),
            File("train-labels-idx1-ubyte.gz", "a25bea736e30d166cdddb491f175f624"),
            File("t10k-images-idx3-ubyte.gz", "2646ac647ad5339dbf082846283269ea"),
            File("t10k-labels-idx1-ubyte.gz", "27ae3e4e09519cfbb04c329615203637"),
        ),
        (
            "http://yann.lecun.com/exdb/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    "sector": Dataset(
        (File("sector.scale.bz2", rows=6412), File("sector.t.scale.bz2", rows=3207)),
        ("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/sector/",),
    ),
}
# A published part of SECTOR in another split, used in the place of the official files by the quick
# preset if it is there: training rows, test rows.
SECTOR_PART = (
    File("sector.test.bz2", "34b7ac2f346b4479bb01ed2356aab8be"),
    File("sector.heldout.bz2", "17b79e2593f7f518278f6bceb9325617"),
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
            tell(f"{target / file.name}: downloaded and checked")
        else:
            tell(f"{target / file.name}: already there")
    return target


def _download(file: File, target: Path, addresses: Iterable[str]) -> None:
    reasons = []
    for address in addresses:
        url = address.rstrip("/") + "/" + file.name
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                packed = answer.read()
            file.unpack(packed)
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
    raise HeldinError(f"data fetch: no address gave {file.name}. " + "; ".join(reasons))


def _read(where: Path, file: File) -> bytes:
    """The checked contents of a file."""
    packed = where / file.name
    if not packed.is_file():
        raise HeldinError(f"{packed} is not there")
    try:
        return file.unpack(packed.read_bytes())
    except HeldinError as error:
        raise HeldinError(f"{error} ({packed})") from error


def require(name: str, data: str | Path | None = None, *, part: bool = True) -> str:
    """Say which files will be used if a dataset is there and sound; else an error: what to do.

    Args:
        name: "mnist" or "sector".
        data: the data folder, see `folder`.
        part: whether the part of SECTOR will do.
    """
    files = _sector_files(data, part) if name == "sector" else DATASETS[name].files[:2]
    try:
        for file in files:
            _read(folder(data) / name, file)
    except HeldinError as error:
        raise HeldinError(
            f"{error}: run `heldin data fetch {name}`, or give a folder that has {name}/ with "
            "--data or HELDIN_DATA"
        ) from error
    note = " (a part of SECTOR, in another split than the paper's)" if files == SECTOR_PART else ""
    return " and ".join(file.name for file in files) + note


def mnist(data: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """MNIST's 60,000 training images, (60000, 784) bytes, and their labels."""
    images, labels = (_read(folder(data) / "mnist", f) for f in DATASETS["mnist"].files[:2])
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
        raw = _read(folder(data) / "sector", file)
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
