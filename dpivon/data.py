"""Data as tensors: scikit-learn's digits and tumors, which need no download, and CIFAR-10.

Each data set comes as an :class:`Images`: two tensors to train on, two to test on, and the names of the classes.
Pixels are mapped to [-1, 1] by the range that the file format fixes, never by a mean or a standard deviation of the
training images: those images are the private data, and their mean is a number computed from them that no privacy
accountant has counted. The numbers that describe a tumor are scaled by constants that need no look at the patients.
"""

import gzip
import hashlib
import os
import pickle
import sys
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

with warnings.catch_warnings():  # pooch loads tqdm's notebook bar, which remarks on missing widgets
    warnings.filterwarnings("ignore", message="IProgress not found")
    import pooch

NAMES = ("digits", "tumors", "cifar10")
#: The ten classes, in the order of their labels.
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# Common values of the ten quantities that scikit-learn's tumors tell as a mean, with its standard error, and as that of
# the largest nuclei. They are round guesses, which no patient's record has moved.
_TYPICAL = np.array([15, 20, 100, 700, 0.1, 0.1, 0.1, 0.05, 0.2, 0.06])

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_HASH = "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
_ARCHIVE = "cifar-10-python.tar.gz"
_FOLDER = "cifar-10-batches-py"
# Training images first, test images last.
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_ROWS = 10_000  # images in a batch
_SIDE = 32


class DataError(ValueError):
    """The data cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """A data set of labeled images, split into a private training set and a public test set.

    Parameters
    ----------
    name : str
        What the data set is called in records and plots.
    x_train : Tensor
        Training images, float32 of shape (N, C, H, W). Pixels are scaled by *public constants*,
        :math:`x = (p / p_\\max - 0.5) / 0.5`, where :math:`p_\\max` is the largest value the format can hold (255 for
        CIFAR-10, 16 for the digits). The channel means and deviations often used for CIFAR-10 are averages over its
        training images, so they would be an unaccounted release; the range of a pixel depends on nobody's image.
    y_train : Tensor
        Training labels, int64 of shape (N,), each in 0 ... ``classes`` - 1.
    x_test, y_test : Tensor
        The test set, of the same form. It is public by declaration: metrics computed from it cost no privacy.
    class_names : tuple of str
        One name a class, in the order of the labels.

    Raises
    ------
    DataError
        If a tensor has another form or a value that is not finite, or a label names no class.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if x.ndim != 4 or x.dtype != torch.float32 or x.shape[1:] != self.x_train.shape[1:] or len(x) == 0:
                raise DataError(
                    f"x_{part} must hold at least one float32 image as (N, C, H, W), in both parts of one shape, "
                    f"got {x.dtype} of shape {tuple(x.shape)}; a table of F columns is (N, 1, 1, F)"
                )
            if not x.isfinite().all():
                raise DataError(
                    f"x_{part} holds values that are not finite; put a public constant where one is missing"
                )
            if y.dtype != torch.int64 or y.shape != x.shape[:1]:
                raise DataError(
                    f"y_{part} must be int64 of shape ({len(x)},), one label an image, got {y.dtype} of shape "
                    f"{tuple(y.shape)}"
                )
            if (low := int(y.min())) < 0 or (high := int(y.max())) >= self.classes:
                raise DataError(
                    f"y_{part} must lie in 0..{self.classes - 1}, the {self.classes} class_names, "
                    f"got {low if low < 0 else high}"
                )

    def __repr__(self) -> str:
        return (
            f"Images({self.name!r}: {self.n} training and {len(self.x_test)} test images of shape {self.shape}, "
            f"{self.classes} classes)"
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of one image."""
        c, h, w = self.x_train.shape[1:]
        return c, h, w

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def n(self) -> int:
        """Number of training examples, the :math:`N` of the sampling rate :math:`q = b / N`."""
        return len(self.x_train)

    def to(self, device: torch.device | str) -> "Images":
        """The same images on a device, such as "cuda".

        Raises
        ------
        ValueError
            If there is no such device here.
        """
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device {device!r} is unknown; use 'cpu', 'cuda' or 'cuda:1'") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {str(device)!r} is not here ({torch.cuda.device_count()} GPUs); use 'cpu'")
        if device == self.x_train.device:
            return self
        names = ("x_train", "y_train", "x_test", "y_test")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of names, types, shapes and bytes: two data sets agree in it only if identical.

        A checkpoint keeps it, so that a run refuses to resume on other data. Computed once (under a second for
        CIFAR-10). It is a function of the private data: keep it with the checkpoint, do not publish it.
        """
        tensors = [t.detach().cpu() for t in (self.x_train, self.y_train, self.x_test, self.y_test)]
        forms = [(str(t.dtype), tuple(t.shape)) for t in tensors]
        digest = hashlib.sha256(repr((self.name, tuple(self.class_names), forms)).encode())
        for t in tensors:
            digest.update(t.numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def load(name: str, root: str | os.PathLike[str] | None = None) -> Images:
    """Load a data set by name.

    Parameters
    ----------
    name : str
        ``"digits"`` or ``"tumors"`` (embedded), or ``"cifar10"``.
    root : path, optional
        Where CIFAR-10 lies, see :func:`cifar10`; the others need no folder.

    Returns
    -------
    Images

    Raises
    ------
    ValueError
        If the name is unknown.
    DataError
        If the files cannot be found, downloaded or read.

    Examples
    --------
    >>> from dpivon import data
    >>> images = data.load("digits")
    >>> images.n, images.shape, images.classes
    (1438, (1, 8, 8), 10)
    >>> [x.item() for x in images.x_train.aminmax()]
    [-1.0, 1.0]
    """
    if name == "digits":
        return digits()
    if name == "tumors":
        return tumors()
    if name == "cifar10":
        return cifar10(root)
    raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(NAMES)}")


def digits() -> Images:
    """Handwritten digits: 1,797 gray images of 8x8 pixels that come with scikit-learn.

    The split is fixed and public: a permutation with seed 0, not stratified, whose first 1,438 images are the
    training set and whose last 359 (a fifth) are the test set. Pixels 0 ... 16 become -1 ... 1.

    Returns
    -------
    Images
        Shape (1, 8, 8), ten classes named ``"0"`` to ``"9"``.
    """
    from sklearn.datasets import load_digits  # costs about a second, which CIFAR-10 need not wait for

    raw = load_digits()
    order = _permutation(len(raw.target), seed=0)
    x = raw.images[order].astype(np.float32)[:, None]
    y = raw.target[order].astype(np.int64)
    return _images("digits", x, y, n_test=359, top=16, names=tuple("0123456789"))


def tumors() -> Images:
    """Breast tumors: 569 patients, each described by 30 numbers, that come with scikit-learn.

    The split is fixed and public: a permutation with seed 0, not stratified, whose first 455 patients are the training
    set and whose last 114 (a fifth) are the test set. Each number is divided by a public constant and cut off at three
    times it, so that 0 ... 3 become -1 ... 2.

    Returns
    -------
    Images
        Of shape (1, 1, 30), a row of numbers instead of pixels; the classes are ``"benign"`` and ``"malignant"``.

    Notes
    -----
    Source: W. N. Street, W. H. Wolberg and O. L. Mangasarian, "Nuclear feature extraction for breast tumor diagnosis",
    1993.
    """
    from sklearn.datasets import load_breast_cancer

    raw = load_breast_cancer()
    order = _permutation(len(raw.target), seed=0)
    constants = np.concatenate([_TYPICAL, _TYPICAL / 20, 1.5 * _TYPICAL])
    x = torch.from_numpy(np.clip(raw.data[order] / constants - 1, -1, 2).astype(np.float32))[:, None, None]
    y = torch.from_numpy(1 - raw.target[order].astype(np.int64))  # the file has 0 for malignant
    return Images("tumors", x[:-114], y[:-114], x[-114:], y[-114:], ("benign", "malignant"))


def cifar10(root: str | os.PathLike[str] | None = None) -> Images:
    """CIFAR-10: 50,000 training and 10,000 test color images of 32x32 pixels in ten classes.

    Parameters
    ----------
    root : path, optional
        Default: ``$DPIVON_DATA``, else the user's cache folder (``~/.cache/dpivon`` on Linux). One of

        - the official archive ``cifar-10-python.tar.gz``, or a folder that holds it;
        - its unpacked folder ``cifar-10-batches-py``, or a folder that holds it;
        - a folder of class folders with RGB images of 32x32 pixels as PNG or JPEG, ``train/<class>/*`` and
          ``test/<class>/*``, with the names in :data:`CIFAR10_CLASSES`;
        - any other folder, also a new one: the official archive (170 MB) is downloaded into it, and its hash checked.

    Returns
    -------
    Images
        Shape (3, 32, 32); pixels 0 ... 255 become -1 ... 1.

    Raises
    ------
    DataError
        If something is missing, damaged, of another size or class, or cannot be downloaded. Nothing half-written
        stays behind.

    Notes
    -----
    The official files are pickles, a format that can run any program on loading. Here a restricted unpickler admits
    numpy arrays and plain containers only, and archives are read in memory, never unpacked to disk.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    root = Path(root or os.environ.get("DPIVON_DATA") or pooch.os_cache("dpivon")).expanduser()
    try:
        read = _find(root) or partial(_read_archive, _download(root))
        return read()
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or root}: {error.strerror or error}; check the path and its permissions"
        ) from error


def hold_out(images: Images, n: int, seed: int) -> Images:
    """Set n training examples aside as the test set, so that tuning never touches the real one.

    The real test set is dropped. The held-out examples *remain private data*: a choice made by their score is a
    release of its own, which the epsilon of the final run does not include. One example more in the data gives another
    permutation, and so another split; an epsilon of what is trained on the rest takes the split as fixed.

    Parameters
    ----------
    images : Images
        The data set to split.
    n : int
        How many training examples to hold out, 1 <= n < ``images.n``.
    seed : int
        Seed of the permutation that picks them: the same seed, the same split.

    Returns
    -------
    Images
        ``images.n - n`` training and n test examples, under the name ``"<name>-holdout"``.

    Raises
    ------
    ValueError
        If n is out of range.
    """
    if not 1 <= n < images.n:
        raise ValueError(f"n must be in 1..{images.n - 1}, which leaves something to train on, got {n}")
    order = torch.from_numpy(_permutation(images.n, seed))
    held, kept = order[:n], order[n:]
    x, y = images.x_train, images.y_train
    return Images(f"{images.name}-holdout", x[kept], y[kept], x[held], y[held], images.class_names)


def _permutation(n: int, seed: int) -> np.ndarray:
    # RandomState, because numpy promises that its stream never changes; a Generator's may, and the split with it.
    return np.random.RandomState(seed).permutation(n)


def _images(name: str, x: np.ndarray, y: np.ndarray, n_test: int, top: int, names: tuple[str, ...]) -> Images:
    """Scale pixels 0..top to -1..1 in place (x stays the only float copy); the last n_test images are the test set."""
    x /= top / 2
    x -= 1
    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    return Images(name, images[:-n_test], labels[:-n_test], images[-n_test:], labels[-n_test:], names)


# ---- CIFAR-10: which of the accepted forms lies at root, and how each is read


def _find(root: Path) -> Callable[[], Images] | None:
    """The reader for what lies at root, or None where nothing does."""
    if root.is_file():
        return partial(_read_archive, root)
    if root.name.endswith((".gz", ".tgz")) and not root.exists():  # an archive was meant: do not make a folder of it
        raise DataError(f"{root} does not exist; get it from {_URL}, or name a folder to download it into")
    for folder in (root, root / _FOLDER):
        if any((folder / batch).exists() for batch in _BATCHES):
            return partial(_read_folder, folder)
    if (root / _ARCHIVE).exists():
        return partial(_read_archive, root / _ARCHIVE)
    if any((root / part).is_dir() for part in ("train", "test", *CIFAR10_CLASSES)):
        return partial(_read_class_folders, root)
    if (root / _FOLDER).is_dir():  # an empty one: say so rather than download around it
        return partial(_read_folder, root / _FOLDER)
    return None


def _fresh(path: Path) -> str:
    return f"remove {path} and run again to download the data, or put a fresh copy of {_URL} in its place"


def _download(root: Path) -> Path:
    """Fetch the official archive into root; pooch moves it there only when it is whole and its hash is right."""
    is_new = not root.exists()
    progress = sys.stderr.isatty()
    downloader = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 16, timeout=(10, 60))
    try:
        path = Path(pooch.retrieve(_URL, _HASH, fname=_ARCHIVE, path=root, downloader=downloader))
    except (OSError, ValueError) as error:  # whatever requests raises is an OSError
        if type(error).__module__.startswith("requests"):
            reason = f"no connection, or a broken one ({type(error).__name__})"
        elif isinstance(error, OSError):
            reason = f"cannot write there ({error.strerror or type(error).__name__})"
        else:
            reason = "what arrived is not the official file (its hash differs)"
        raise DataError(
            f"could not download {root / _ARCHIVE}: {reason}; run again, or get {_URL} by hand and put it there, "
            f"or set $DPIVON_DATA to a folder that has it"
        ) from error
    finally:
        if is_new:
            with suppress(OSError):  # removes only an empty folder, so only after a failure
                root.rmdir()
    with suppress(OSError):  # pooch's temporary file was readable by its owner only; a data folder may be shared
        path.chmod(0o644)
    return path


def _read_archive(path: Path) -> Images:
    def batches(tar: tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
        for member in tar:  # in the order of the archive: one pass of decompression
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            stream = tar.extractfile(member) if member.isfile() else None
            if stream and folder == _FOLDER and name in _BATCHES:
                yield name, stream

    try:
        with gzip.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            images = _assemble(batches(tar), lambda name: f"{name} in {path}", _fresh(path))
            while stream.read(1 << 20):  # to the very end, where gzip keeps its checksum
                pass
            return images
    except (gzip.BadGzipFile, zlib.error, EOFError, tarfile.TarError) as error:
        raise DataError(f"{path} is damaged, incomplete or no .tar.gz archive ({error}); {_fresh(path)}") from error


def _read_folder(folder: Path) -> Images:
    def batches() -> Iterator[tuple[str, IO[bytes]]]:
        for name in _BATCHES:
            if (folder / name).exists():
                with (folder / name).open("rb") as stream:
                    yield name, stream

    return _assemble(batches(), lambda name: str(folder / name), _fresh(folder))


def _assemble(batches: Iterable[tuple[str, IO[bytes]]], where: Callable[[str], str], remedy: str) -> Images:
    """Read the six batches, in whatever order they come, into one array; `where` tells a batch's place."""
    x = np.empty((len(_BATCHES) * _ROWS, 3, _SIDE, _SIDE), np.float32)
    y = np.empty(len(x), np.int64)
    missing = list(_BATCHES)
    for name, stream in batches:
        start = _BATCHES.index(name) * _ROWS
        rows = slice(start, start + _ROWS)
        x[rows], y[rows] = _read_batch(stream, where(name), remedy)
        if name in missing:
            missing.remove(name)
    if missing:
        raise DataError(f"{where(missing[0])} is missing ({len(missing)} of {len(_BATCHES)} batches are); {remedy}")
    return _images("cifar10", x, y, n_test=_ROWS, top=255, names=CIFAR10_CLASSES)


def _read_batch(stream: IO[bytes], where: str, remedy: str) -> tuple[np.ndarray, np.ndarray]:
    """One official batch: pixels (rows, 3, 32, 32) uint8 and labels (rows,)."""
    try:
        raw = _Unpickler(stream, encoding="bytes").load()
        entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in raw.items()}
        pixels, labels = np.asarray(entries["data"]), np.asarray(entries["labels"])
    except Exception as error:  # broken bytes are a program to pickle: it can fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{where} is damaged or no CIFAR-10 batch ({reason}); {remedy}") from error
    if pixels.dtype != np.uint8 or pixels.shape != (_ROWS, 3 * _SIDE * _SIDE):
        raise DataError(
            f"{where} must hold {_ROWS} images of 3x{_SIDE}x{_SIDE} bytes, got {pixels.dtype} of shape "
            f"{pixels.shape}; {remedy}"
        )
    if labels.dtype.kind not in "iu" or labels.shape != (_ROWS,):
        raise DataError(
            f"{where} must hold {_ROWS} integer labels, got {labels.dtype} of shape {labels.shape}; {remedy}"
        )
    wrong = (labels < 0) | (labels >= len(CIFAR10_CLASSES))
    if wrong.any():
        raise DataError(f"{where} has a label outside 0..9: {labels[wrong][0]}; {remedy}")
    return pixels.reshape(-1, 3, _SIDE, _SIDE), labels


def _dtype(name: str | bytes, *flags: object) -> np.dtype:
    # Python 2 wrote the name as bytes and the flags as 0 and 1, which numpy 2.4.0 to 2.4.4 warn about.
    return np.dtype(name.decode() if isinstance(name, bytes) else name, copy=True)  # type: ignore[call-overload]


# Asking an array for its recipe gives numpy's two functions without importing its private modules, which moved.
_rebuild, _from_buffer = (np.zeros(1).__reduce_ex__(protocol)[0] for protocol in (4, 5))


class _Unpickler(pickle.Unpickler):
    """Loads what the batches need, as written by Python 2 or 3 and numpy 1 or 2, and refuses all else unrun."""

    allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): _dtype,
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # how bytes travel in pickle protocols 0 to 2
        **{(f"numpy.{core}.multiarray", "_reconstruct"): _rebuild for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch needs") from None


def _read_class_folders(root: Path) -> Images:
    """Images in root/<split>/<class>/*, ordered by class, then by file name."""
    files: list[tuple[Path, int]] = []
    counts = []
    for split in ("train", "test"):
        found = list(_list_class_folders(root / split))
        files += found
        counts.append(len(found))
    x = np.empty((len(files), 3, _SIDE, _SIDE), np.float32)
    for i, (path, _) in enumerate(files):
        x[i] = _read_image(path)
    y = np.array([label for _, label in files], np.int64)
    return _images("cifar10", x, y, n_test=counts[1], top=255, names=CIFAR10_CLASSES)


def _list_class_folders(split: Path) -> Iterator[tuple[Path, int]]:
    if not split.is_dir():
        raise DataError(f"{split} is missing; sort the images into train/<class>/ and test/<class>/")
    for folder in split.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in CIFAR10_CLASSES:
            raise DataError(f"{folder} is no CIFAR-10 class; rename it to one of {', '.join(CIFAR10_CLASSES)}")
    for label, name in enumerate(CIFAR10_CLASSES):
        folder = split / name
        names = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
        if not names:
            raise DataError(f"{folder} is missing or empty; put the PNG or JPEG images of this class there")
        yield from ((folder / file, label) for file in names)


def _read_image(path: Path) -> np.ndarray:
    """One image as (3, 32, 32) uint8."""
    remedy = f"replace it by an RGB image of {_SIDE}x{_SIDE} pixels, as PNG or JPEG, or remove it"
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            size, mode = image.size, image.mode
            # Decode only what has the right size: a small file can claim to be a huge image.
            pixels = np.asarray(image) if size == (_SIDE, _SIDE) else None
    except Exception as error:  # broken images make Pillow raise many things besides OSError
        raise DataError(f"{path} is damaged or no PNG or JPEG image ({error}); {remedy}") from error
    if pixels is None or mode != "RGB":
        raise DataError(f"{path} is a {mode} image of {size[0]}x{size[1]} pixels; {remedy}")
    return pixels.transpose(2, 0, 1)
