"""dpivon.data: what is read, what is refused, and what is left behind."""

import gzip
import hashlib
import http.server
import io
import os
import pickle
import shutil
import struct
import tarfile
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from dpivon import data

ROWS = 12
FOLDER, ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
BATCHES = [*TRAIN, "test_batch"]
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"

Raw = dict[str, tuple[np.ndarray, np.ndarray]]


# ---- helpers: CIFAR-10 in miniature


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a dozen images instead of ten thousand."""
    monkeypatch.setattr(data, "_ROWS", ROWS)


@pytest.fixture
def raw() -> Raw:
    random = np.random.RandomState(0)
    return {
        name: (random.randint(0, 256, (ROWS, 3072), dtype=np.uint8), random.randint(0, 10, ROWS)) for name in BATCHES
    }


def dump(pixels: Any, labels: Any, protocol: int = 4) -> bytes:
    return pickle.dumps({b"batch_label": b"a batch", b"data": pixels, b"labels": labels}, protocol=protocol)


def write_folder(root: Path, raw: Raw, protocol: int = 4) -> Path:
    folder = root / FOLDER
    folder.mkdir(parents=True)
    for name, (pixels, labels) in raw.items():
        (folder / name).write_bytes(dump(pixels, labels.tolist(), protocol))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": []}))
    (folder / "readme.html").write_text("<html>")
    return folder


def pack(raw: Raw, prefix: str = "", reverse: bool = False) -> bytes:
    """The archive, as bytes; the official one holds its batches in no particular order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        folder = tarfile.TarInfo(f"{prefix}{FOLDER}")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        members = [(name, dump(pixels, labels.tolist())) for name, (pixels, labels) in raw.items()]
        for name, content in [*(members[::-1] if reverse else members), ("readme.html", b"<html>")]:
            member = tarfile.TarInfo(f"{prefix}{FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def write_images(root: Path, per_class: int = 2, extension: str = "png") -> Path:
    random = np.random.RandomState(1)
    for split in ("train", "test"):
        for name in data.CIFAR10_CLASSES:
            (root / split / name).mkdir(parents=True)
            for i in range(per_class):
                pixels = random.randint(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.{extension}")
    return root


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else b"" for p in sorted(root.rglob("*"))}


def refused(root: Path, *parts: str, watch: Path) -> str:
    """cifar10(root) raises a DataError of one line that holds all parts, and changes nothing under watch."""
    before = listing(watch)
    with pytest.raises(data.DataError) as caught:
        data.cifar10(root)
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert "\n" not in message
    assert listing(watch) == before
    return message


def expect(images: data.Images, raw: Raw) -> None:
    """images holds exactly what raw holds, scaled by the range of a byte."""
    pixels = np.concatenate([raw[name][0] for name in BATCHES]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([raw[name][1] for name in BATCHES])
    x = torch.cat([images.x_train, images.x_test]).double()
    np.testing.assert_allclose(x, (pixels / 255 - 0.5) / 0.5, atol=1e-7)
    np.testing.assert_array_equal(torch.cat([images.y_train, images.y_test]), labels)
    assert (images.name, images.n, len(images.x_test), images.shape) == ("cifar10", 5 * ROWS, ROWS, (3, 32, 32))
    assert images.x_train.dtype == torch.float32
    assert images.y_train.dtype == torch.int64
    assert images.class_names == data.CIFAR10_CLASSES


# ---- Images


def tiny(**changes: Any) -> data.Images:
    parts: dict[str, Any] = {
        "name": "tiny",
        "x_train": torch.arange(12.0).reshape(3, 1, 2, 2),
        "y_train": torch.tensor([0, 1, 1]),
        "x_test": torch.zeros(1, 1, 2, 2),
        "y_test": torch.tensor([0]),
        "class_names": ("a", "b"),
    }
    return data.Images(**{**parts, **changes})


def test_images_describes_itself() -> None:
    images = tiny()
    assert (images.shape, images.classes, images.n) == ((1, 2, 2), 2, 3)
    assert repr(images) == "Images('tiny': 3 training and 1 test images of shape (1, 2, 2), 2 classes)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": torch.zeros(3, 2, 2)}, "x_train must hold .*(3, 2, 2)"),
        ({"x_train": torch.zeros(3, 1, 2, 2).double()}, "x_train must hold .*float64"),
        ({"x_test": torch.zeros(1, 1, 3, 3)}, "x_test must hold .*one shape.*(1, 1, 3, 3)"),
        ({"x_test": torch.zeros(0, 1, 2, 2)}, "x_test must hold at least one"),
        ({"y_train": torch.tensor([0, 1])}, r"y_train must be int64 of shape \(3,\)"),
        ({"y_test": torch.tensor([0.0])}, "y_test must be int64 .*float32"),
        ({"y_train": torch.tensor([0, 2, 1])}, r"y_train must lie in 0\.\.1.*got 2"),
        ({"y_test": torch.tensor([-1])}, r"y_test must lie in 0\.\.1.*got -1"),
    ],
)
def test_images_refuses_other_forms(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(data.DataError, match=message):
        tiny(**changes)


def test_fingerprint_is_equal_for_equal_data_only() -> None:
    images = tiny()
    assert len(images.fingerprint) == 64
    assert images.fingerprint == tiny().fingerprint
    changed = images.x_train.clone()
    changed[2, 0, 1, 1] += 1e-5
    others = [
        tiny(x_train=changed),
        tiny(x_train=images.x_train.reshape(3, 1, 1, 4), x_test=images.x_test.reshape(1, 1, 1, 4)),
        tiny(y_train=torch.tensor([1, 1, 0])),
        tiny(x_test=torch.ones(1, 1, 2, 2)),
        tiny(y_test=torch.tensor([1])),
        tiny(class_names=("b", "a")),
        tiny(class_names=("a", "b", "c")),
        tiny(name="other"),
    ]
    assert len({images.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


def test_fingerprint_does_not_depend_on_memory_layout() -> None:
    x = tiny().x_train
    transposed = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert not transposed.is_contiguous()
    assert tiny(x_train=transposed).fingerprint == tiny().fingerprint


def test_fingerprint_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = tiny()
    first = images.fingerprint
    monkeypatch.setattr(hashlib, "sha256", None)
    assert images.fingerprint == first


# ---- load and digits


def test_load_knows_its_names(small: None, raw: Raw, tmp_path: Path) -> None:
    assert data.load("digits").name == "digits"
    write_folder(tmp_path, raw)
    expect(data.load("cifar10", tmp_path), raw)
    with pytest.raises(ValueError, match=r"'mnist'.*digits, tumors, cifar10"):
        data.load("mnist")


def test_tumors_are_all_of_scikit_learns_patients_scaled_by_constants() -> None:
    from sklearn.datasets import load_breast_cancer

    raw, found = load_breast_cancer(), data.load("tumors")
    assert (found.n, len(found.x_test), found.shape, found.class_names) == (
        455,
        114,
        (1, 1, 30),
        ("benign", "malignant"),
    )
    x, y = torch.cat([found.x_train, found.x_test]).flatten(1), torch.cat([found.y_train, found.y_test])
    assert x.aminmax() == (torch.tensor(-1.0), torch.tensor(2.0))
    assert int(y.sum()) == 212  # malignant
    order = np.random.RandomState(0).permutation(569)
    assert y.tolist() == [int(raw.target_names[raw.target[k]] == "malignant") for k in order]
    radius, texture, worst_radius = (
        list(raw.feature_names).index(n) for n in ("mean radius", "mean texture", "worst radius")
    )
    for column, constant in ((radius, 15), (texture, 20), (worst_radius, 22.5)):
        assert np.allclose(x[:, column] + 1, np.minimum(raw.data[order, column] / constant, 3), atol=1e-6)


def test_tumors_are_scaled_without_a_look_at_the_patients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another patient's record changes nobody's numbers but their own."""
    import sklearn.datasets

    before, raw = data.load("tumors"), sklearn.datasets.load_breast_cancer()
    changed = int(np.random.RandomState(0).permutation(569)[7])
    raw.data[changed] *= 100
    monkeypatch.setattr(sklearn.datasets, "load_breast_cancer", lambda: raw)
    after = data.load("tumors")
    differs = (before.x_train != after.x_train).flatten(1).any(1)
    assert differs.nonzero().flatten().tolist() == [7]
    assert torch.equal(before.x_test, after.x_test)


def test_digits_are_all_of_scikit_learns_digits() -> None:
    images = data.digits()
    assert (images.n, len(images.x_test), images.shape, images.classes) == (1438, 359, (1, 8, 8), 10)
    x = torch.cat([images.x_train, images.x_test]).double().numpy()
    y = torch.cat([images.y_train, images.y_test]).numpy()
    found = np.column_stack([((x + 1) * 8).reshape(-1, 64), y])
    original = load_digits()
    wanted = np.column_stack([original.data, original.target])
    np.testing.assert_array_equal(found[np.lexsort(found.T)], wanted[np.lexsort(wanted.T)])
    assert min(torch.bincount(images.y_test)) > 20


def test_the_split_of_the_digits_never_changes() -> None:
    # The fingerprint covers every pixel and label: recorded results would no longer mean the same if it moved.
    assert data.digits().fingerprint == "742b7aa52dda54c87668618b758fecc58ddd06234f0943c06effaea4214d72a0"


# ---- CIFAR-10: what is accepted


def test_every_official_form_gives_the_same_images(small: None, raw: Raw, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "unpacked", raw)
    archives = {"packed": pack(raw), "dotted": pack(raw, prefix="./"), "reversed": pack(raw, reverse=True)}
    for name, content in archives.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ARCHIVE).write_bytes(content)
    renamed = tmp_path / "renamed.tgz"
    renamed.write_bytes(archives["packed"])
    moved = shutil.copytree(folder, tmp_path / "moved")

    first = data.cifar10(folder)
    expect(first, raw)
    for root in (folder.parent, moved, tmp_path / "packed" / ARCHIVE, renamed, *(tmp_path / name for name in archives)):
        assert data.cifar10(str(root)).fingerprint == first.fingerprint


def test_an_unpacked_folder_goes_before_its_archive(small: None, raw: Raw, tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(b"slower to read, so not touched")
    write_folder(tmp_path, raw)
    expect(data.cifar10(tmp_path), raw)


def test_paths_of_any_letters_work(small: None, raw: Raw, tmp_path: Path) -> None:
    root = tmp_path / "Bilder für {0} %s 画像"
    write_folder(root / "a", raw)
    (root / "b").mkdir()
    (root / "b" / ARCHIVE).write_bytes(pack(raw))
    write_images(root / "c", per_class=1)
    for name in "abc":
        assert data.cifar10(root / name).classes == 10
    (root / "a" / FOLDER / "test_batch").unlink()
    refused(root / "a", str(root / "a" / FOLDER / "test_batch"), "missing", watch=tmp_path)
    (root / "b" / ARCHIVE).write_bytes(pack({"test_batch": raw["test_batch"]}))
    refused(root / "b", f"data_batch_1 in {root / 'b' / ARCHIVE}", "missing", watch=tmp_path)


def test_a_read_only_folder_is_enough_and_reading_writes_nothing(small: None, raw: Raw, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", raw)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ARCHIVE).write_bytes(pack(raw))
    write_images(tmp_path / "c", per_class=1)
    before = listing(tmp_path)
    paths = [folder, *tmp_path.rglob("*")]
    try:
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        for name in "abc":
            data.cifar10(tmp_path / name)
    finally:
        for path in sorted(paths):
            path.chmod(0o755)
    assert listing(tmp_path) == before


def test_the_default_root_is_the_environment_then_the_cache(
    small: None, raw: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {name: (255 - pixels, labels) for name, (pixels, labels) in raw.items()}
    write_folder(tmp_path / "named", raw)
    write_folder(tmp_path / "cache" / "dpivon", other)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.setenv("DPIVON_DATA", str(tmp_path / "named"))
    expect(data.cifar10(), raw)
    monkeypatch.setenv("DPIVON_DATA", "")
    expect(data.cifar10(), other)
    monkeypatch.delenv("DPIVON_DATA")
    expect(data.cifar10(), other)
    monkeypatch.setenv("HOME", str(tmp_path))
    expect(data.cifar10("~/named"), raw)


def test_an_image_does_not_depend_on_the_other_images(small: None, raw: Raw, tmp_path: Path) -> None:
    """The scaling uses no statistic of the private data: replacing one image leaves all others bitwise alone."""
    write_folder(tmp_path / "a", raw)
    before = data.cifar10(tmp_path / "a")
    raw["data_batch_2"][0][3] = 255
    write_folder(tmp_path / "b", raw)
    after = data.cifar10(tmp_path / "b")
    same = (before.x_train == after.x_train).flatten(1).all(1)
    assert torch.nonzero(~same).tolist() == [[ROWS + 3]]
    assert torch.equal(before.x_test, after.x_test)
    assert (after.x_train[ROWS + 3] == 1).all()


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 and numpy 1 pickled it, opcode by opcode: the form of the official files."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + b"".join(b"J" + struct.pack("<i", n) for n in pixels.shape) + b"\x86"
        + dtype + b"K\x00tb\x89T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes() + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    batch_label = text(b"batch_label") + text(b"training batch 1 of 5")
    return b"\x80\x02}(" + batch_label + text(b"data") + array + text(b"labels") + numbers + b"u."


@pytest.mark.parametrize("form", ["python 2", "text keys", "label array", "column order", "old numpy", *range(6)])
def test_batches_of_every_python_and_numpy_are_read(small: None, raw: Raw, tmp_path: Path, form: str | int) -> None:
    pixels, labels = raw["data_batch_1"]
    folder = write_folder(tmp_path, raw)
    if isinstance(form, int):  # the protocol of pickle
        content = dump(pixels, labels.tolist(), form)
    else:
        content = {
            "python 2": python2_pickle(pixels, labels.tolist()),
            "text keys": pickle.dumps({"data": pixels, "labels": labels.tolist()}),
            "label array": pickle.dumps({b"data": pixels, b"labels": labels}),
            "column order": dump(np.asfortranarray(pixels), labels.tolist()),
            "old numpy": dump(pixels, labels.tolist(), 2).replace(b"numpy._core.", b"numpy.core."),
        }[form]
    if form in ("python 2", "old numpy"):
        assert b"numpy.core.multiarray" in content
    (folder / "data_batch_1").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns about Python 2's flags, torch about read-only memory
        expect(data.cifar10(tmp_path), raw)


def test_the_flags_of_python_2_do_not_reach_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    # numpy 2.4.0 to 2.4.4 warn about 0 and 1 in the place of False and True; other versions do not.
    with monkeypatch.context() as patch:
        patch.setattr(np, "dtype", lambda *args, **kwargs: (args, kwargs))
        called = data._Unpickler.allowed["numpy", "dtype"](b"u1", 0, 1)
    assert called == (("u1",), {"copy": True})


# ---- CIFAR-10: what is refused


def garble(folder: Path, raw: Raw, how: str) -> None:
    path = folder / "data_batch_3"
    pixels, labels = raw["data_batch_3"]
    if how == "missing":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    else:
        good = path.read_bytes()
        contents: dict[str, bytes] = {
            "empty": b"",
            "half": good[: len(good) // 2],
            "last byte lost": good[:-1],
            "text": b"<html>404 not found</html>",
            "a list": pickle.dumps([1, 2]),
            "no labels": pickle.dumps({b"data": pixels}),
            "no data": pickle.dumps({b"labels": labels.tolist()}),
            "numbered keys": pickle.dumps({1: 2}),
            "one row less": dump(pixels[1:], labels.tolist()),
            "gray": dump(pixels[:, :1024], labels.tolist()),
            "float": dump(pixels.astype(np.float32), labels.tolist()),
            "objects": dump(pixels.astype(object), labels.tolist()),
            "ragged": dump([[1], [1, 2]], labels.tolist()),
            "label 10": dump(pixels, [*labels[1:].tolist(), 10]),
            "label -1": dump(pixels, [*labels[1:].tolist(), -1]),
            "one label less": dump(pixels, labels[1:].tolist()),
            "float labels": dump(pixels, labels.astype(float).tolist()),
            "label names": dump(pixels, ["cat"] * ROWS),
        }
        path.write_bytes(contents[how])


DAMAGE = {
    "missing": "is missing (1 of 6 batches",
    "a folder": "cannot read",
    "empty": "damaged",
    "half": "damaged",
    "last byte lost": "damaged",
    "text": "damaged",
    "a list": "no CIFAR-10 batch",
    "no labels": "'labels'",
    "no data": "'data'",
    "numbered keys": "no CIFAR-10 batch",
    "one row less": "must hold 12 images of 3x32x32 bytes, got uint8 of shape (11, 3072)",
    "gray": "shape (12, 1024)",
    "float": "float32",
    "objects": "object",
    "ragged": "no CIFAR-10 batch",
    "label 10": "label outside 0..9: 10",
    "label -1": "label outside 0..9: -1",
    "one label less": "must hold 12 integer labels",
    "float labels": "float64",
    "label names": "<U3",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_batch_is_refused(small: None, raw: Raw, tmp_path: Path, how: str) -> None:
    folder = write_folder(tmp_path, raw)
    expect(data.cifar10(tmp_path), raw)
    garble(folder, raw, how)
    remedy = "check the path" if how == "a folder" else f"remove {folder}"
    message = refused(tmp_path, str(folder / "data_batch_3"), DAMAGE[how], remedy, watch=tmp_path)
    assert how == "a folder" or URL in message


def test_a_batch_has_ten_thousand_images(raw: Raw, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, raw)
    refused(tmp_path, str(folder / "data_batch_1"), "10000 images", "(12, 3072)", watch=tmp_path)


def test_an_empty_unpacked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    refused(tmp_path, str(tmp_path / FOLDER / "data_batch_1"), "6 of 6", URL, watch=tmp_path)


def test_damaged_archives_are_refused(small: None, raw: Raw, tmp_path: Path) -> None:
    path = tmp_path / ARCHIVE
    good = pack(raw)
    checksum = bytearray(good)
    checksum[-8] ^= 1
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    plain_tar = gzip.decompress(good)
    stream = zlib.compressobj(wbits=31)
    whole_tar = stream.compress(plain_tar + bytes(20_000)) + stream.flush(zlib.Z_FULL_FLUSH)
    for content in (
        b"",
        b"not an archive",
        gzip.compress(b"not a tar" * 1000),
        plain_tar,
        good[:10] + b"\xff" * 20 + good[30:],
        whole_tar + b"\xff" * 50,  # the damage lies behind the last batch
        bytes(checksum),
        bytes(flipped),
        good[:-1],
        good[:100],
        good[: len(good) // 2],
        good[: len(good) * 95 // 100],
        gzip.compress(plain_tar[: len(plain_tar) // 2]),
    ):
        path.write_bytes(content)
        for root in (tmp_path, path):
            refused(root, str(path), f"remove {path}", URL, watch=tmp_path)
    path.write_bytes(good)
    expect(data.cifar10(path), raw)


def test_an_archive_with_other_content_is_refused(small: None, raw: Raw, tmp_path: Path) -> None:
    path = tmp_path / ARCHIVE
    path.write_bytes(pack({name: raw[name] for name in TRAIN}))
    refused(path, f"test_batch in {path} is missing (1 of 6", URL, watch=tmp_path)
    path.write_bytes(pack(raw, prefix="elsewhere/"))
    refused(path, f"data_batch_1 in {path} is missing (6 of 6", URL, watch=tmp_path)
    raw["data_batch_4"][1][5] = 77
    path.write_bytes(pack(raw))
    refused(path, f"data_batch_4 in {path} has a label outside 0..9: 77", URL, watch=tmp_path)


@given(cut=st.floats(0, 1, exclude_max=True), position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_broken_bytes_give_a_data_error_or_the_same_form(cut: float, position: float, bit: int) -> None:
    good = dump(np.zeros((ROWS, 3072), np.uint8), [0] * ROWS)
    flipped = bytearray(good)
    place = int(position * 400) - 200  # the opcodes stand at both ends, the pixels between
    flipped[place] ^= 1 << bit
    # Two opcodes make pickle itself misbehave before it fails: one takes gigabytes, one complains on stderr.
    assume(flipped[place] not in b"r\x96")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_ROWS", ROWS)
        with pytest.raises(data.DataError, match=r"here .*; mend it"):
            data._read_batch(io.BytesIO(good[: int(cut * len(good))]), "here", "mend it")
        try:
            pixels, labels = data._read_batch(io.BytesIO(bytes(flipped)), "here", "mend it")
        except data.DataError:
            return
        assert pixels.shape == (ROWS, 3, 32, 32)
        assert labels.shape == (ROWS,)


def test_a_missing_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data" / ARCHIVE
    refused(path, str(path), "does not exist", URL, watch=tmp_path)


# ---- CIFAR-10: what must not happen


class Runs:
    """Unpickling it calls a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["batch", "entry", "pixels"])
def test_a_malicious_pickle_does_not_run(small: None, raw: Raw, tmp_path: Path, packed: bool, place: str) -> None:
    mark = tmp_path / "mark"
    evil = Runs(os.mkdir, str(mark))
    pixels, labels = raw["data_batch_1"]
    content = {
        "batch": pickle.dumps(evil),
        "entry": pickle.dumps({b"data": pixels, b"labels": labels.tolist(), b"more": evil}),
        "pixels": dump(np.array([[evil]], dtype=object), labels.tolist()),
    }[place]
    pickle.loads(content)
    assert mark.exists()  # so an unguarded reader would have run it
    mark.rmdir()

    folder = write_folder(tmp_path / "data", raw)
    (folder / "data_batch_1").write_bytes(content)
    root, where = tmp_path / "data", str(folder / "data_batch_1")
    if packed:
        root = tmp_path / ARCHIVE
        where = f"data_batch_1 in {root}"
        with tarfile.open(root, "w:gz") as tar:
            tar.add(folder, FOLDER)
    refused(root, where, f"{os.mkdir.__module__}.mkdir", f"remove {root if packed else folder}", watch=tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "os.system", "numpy.load", "numpy.memmap", "numpy.fromfile", "_codecs.decode"],
)
def test_no_other_global_is_admitted(name: str) -> None:
    module, _, function = name.rpartition(".")
    content = f"c{module}\n{function}\n.".encode()
    with pytest.raises(data.DataError, match=f"asks for {name}"):
        data._read_batch(io.BytesIO(content), "here", "mend it")


def test_an_archive_writes_nothing_anywhere(small: None, raw: Raw, tmp_path: Path) -> None:
    path = tmp_path / "a" / ARCHIVE
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        for name in (f"../{FOLDER}/data_batch_1", str(tmp_path / "absolute"), f"{FOLDER}/../../data_batch_2"):
            content = dump(*raw["data_batch_1"])
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, kind in (("data_batch_1", tarfile.SYMTYPE), ("data_batch_2", tarfile.LNKTYPE)):
            link = tarfile.TarInfo(f"{FOLDER}/{name}")
            link.type, link.linkname = kind, "/etc/passwd"
            tar.addfile(link)
    refused(path, f"data_batch_1 in {path} is missing (6 of 6", watch=tmp_path)


# ---- class folders


@pytest.mark.parametrize("extension", ["png", "jpg", "JPEG"])
def test_class_folders_are_read(tmp_path: Path, extension: str) -> None:
    root = write_images(tmp_path / "images", extension=extension)
    (root / "train" / "cat" / ".DS_Store").write_text("left by a file browser")
    (root / "train" / ".cache").mkdir()
    (root / "labels.csv").write_text("not an image, and not in a class folder")
    images = data.cifar10(root)
    assert (images.n, len(images.x_test), images.shape) == (20, 20, (3, 32, 32))
    assert images.class_names == data.CIFAR10_CLASSES
    assert images.y_train.tolist() == [i // 2 for i in range(20)]
    for i, (x, y) in enumerate(zip(images.x_test, images.y_test, strict=True)):
        with Image.open(root / "test" / data.CIFAR10_CLASSES[y] / f"{i % 2}.{extension}") as image:
            np.testing.assert_allclose(x.permute(1, 2, 0), np.asarray(image) / 127.5 - 1, atol=1e-6)


def test_class_folders_may_differ_in_size(tmp_path: Path) -> None:
    root = write_images(tmp_path)
    (root / "train" / "ship" / "0.png").unlink()
    (root / "test" / "frog" / "1.png").unlink()
    (root / "test" / "bird" / "1.png").unlink()
    images = data.cifar10(root)
    assert torch.bincount(images.y_train).tolist() == [2] * 8 + [1, 2]
    assert torch.bincount(images.y_test).tolist() == [2, 2, 1, 2, 2, 2, 1, 2, 2, 2]


def pixels_of(*shape: int) -> np.ndarray:
    return np.random.RandomState(2).randint(0, 256, shape, dtype=np.uint8)


def spoil(path: Path, how: str) -> None:
    pixels = pixels_of(32, 32, 3)
    good = path.read_bytes()
    if how == "large":
        Image.fromarray(pixels_of(33, 32, 3)).save(path)
    elif how == "gray":
        Image.fromarray(pixels_of(32, 32)).save(path)
    elif how == "alpha":
        Image.fromarray(pixels_of(32, 32, 4)).save(path)
    elif how == "palette":
        Image.fromarray(pixels).quantize(16).save(path)
    elif how == "gif":
        Image.fromarray(pixels).save(path, format="gif")
    elif how == "text":
        path.write_text("not an image")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "half":
        path.write_bytes(good[: len(good) // 2])
    elif how == "flipped":
        path.write_bytes(good[:1500] + bytes([good[1500] ^ 1]) + good[1501:])
    elif how == "huge":  # a small file that claims to be a huge image
        path.write_bytes(good[:16] + struct.pack(">II", 100_000, 100_000) + good[24:])
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("large", "RGB image of 32x33 pixels"),
        ("gray", "L image of 32x32 pixels"),
        ("alpha", "RGBA image of 32x32 pixels"),
        ("palette", "P image of 32x32 pixels"),
        *((how, "damaged") for how in ("gif", "text", "empty", "half", "flipped", "huge", "a folder")),
    ],
)
def test_a_wrong_image_is_refused(tmp_path: Path, how: str, message: str) -> None:
    path = write_images(tmp_path, per_class=1) / "train" / "dog" / "0.png"
    data.cifar10(tmp_path)
    spoil(path, how)
    refused(tmp_path, str(path), message, "replace it by an RGB image of 32x32 pixels", watch=tmp_path)


def test_a_file_that_is_no_image_is_refused(tmp_path: Path) -> None:
    path = write_images(tmp_path, per_class=1) / "test" / "ship" / "notes.txt"
    path.write_text("a note")
    refused(tmp_path, str(path), "no PNG or JPEG", "remove it", watch=tmp_path)


def test_wrong_class_folders_are_refused(tmp_path: Path) -> None:
    root = write_images(tmp_path / "images", per_class=1)
    (root / "train" / "plane").mkdir()
    refused(root, str(root / "train" / "plane"), "rename it to one of airplane, automobile", watch=tmp_path)
    (root / "train" / "plane").rmdir()
    data.cifar10(root)
    (root / "test" / "deer" / "0.png").unlink()
    refused(root, str(root / "test" / "deer"), "missing or empty; put the PNG or JPEG", watch=tmp_path)
    (root / "test" / "deer").rmdir()
    refused(root, str(root / "test" / "deer"), "missing or empty; put the PNG or JPEG", watch=tmp_path)
    shutil.rmtree(root / "test")
    refused(root, str(root / "test"), "missing; sort the images into train/<class>/", watch=tmp_path)
    refused(root / "train", str(root / "train" / "train"), "missing; sort the images into", watch=tmp_path)
    shutil.rmtree(root / "train")
    for split in ("train", "test"):
        (root / split).mkdir()
    refused(root, str(root / "train" / "airplane"), "missing or empty", watch=tmp_path)


# ---- download


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    content = b""
    mode = "good"
    requests = 0


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests += 1
        content, mode = self.server.content, self.server.mode
        self.send_response(404 if mode == "404" else 200)
        if mode != "no length":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if mode == "other":
            content = content[:-1] + b"?"
        self.wfile.write(content[: len(content) // 2] if mode in ("dropped", "no length") else content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(small: None, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on this machine that stands for the official one, with the archive in miniature."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.content = pack(raw)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(data, "_URL", f"http://127.0.0.1:{server.server_port}/{ARCHIVE}")
        monkeypatch.setattr(data, "_HASH", f"sha256:{hashlib.sha256(server.content).hexdigest()}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("dropped", "no connection, or a broken one"),
        ("no length", "not the official file"),
        ("other", "not the official file"),
        ("404", "no connection, or a broken one (HTTPError)"),
    ],
)
def test_a_failed_download_leaves_nothing_and_a_retry_succeeds(
    server: Server, raw: Raw, tmp_path: Path, mode: str, reason: str, is_new: bool
) -> None:
    root = tmp_path / "new" if is_new else tmp_path
    (tmp_path / "other.txt").write_text("not ours")
    server.mode = mode
    for attempt in (1, 2):
        refused(root, str(root / ARCHIVE), reason, data._URL, "by hand", "$DPIVON_DATA", watch=tmp_path)
        assert server.requests == attempt
        assert root.exists() != is_new
    server.mode = "good"
    expect(data.cifar10(root), raw)
    assert server.requests == 3
    assert {p.name for p in root.iterdir()} == {ARCHIVE} | (set() if is_new else {"other.txt"})
    expect(data.cifar10(root), raw)
    assert server.requests == 3  # the second time, the file is there


def test_without_a_server_the_error_says_what_to_do(server: Server, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    root = tmp_path / "new"
    parts = "no connection", data._URL, "by hand and put it there", "$DPIVON_DATA"
    refused(root, str(root / ARCHIVE), *parts, watch=tmp_path)


def test_an_interrupted_download_leaves_nothing(
    server: Server, raw: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, url: str, output_file: str, *args: Any) -> None:
        Path(output_file).write_bytes(server.content[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pooch.HTTPDownloader, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            data.cifar10(tmp_path / "new")
    assert listing(tmp_path) == {}
    expect(data.cifar10(tmp_path / "new"), raw)


def test_a_half_written_archive_is_never_taken_for_whole(server: Server, raw: Raw, tmp_path: Path) -> None:
    path = tmp_path / ARCHIVE
    path.write_bytes(server.content[: len(server.content) // 2])
    refused(tmp_path, str(path), "damaged", f"remove {path} and run again", watch=tmp_path)
    path.unlink()
    expect(data.cifar10(tmp_path), raw)  # the remedy works


def test_the_remedy_for_a_partial_folder_works(server: Server, raw: Raw, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, raw)
    (folder / "test_batch").unlink()
    refused(folder, f"remove {folder} and run again", watch=tmp_path)
    shutil.rmtree(folder)
    for _ in range(2):
        expect(data.cifar10(folder), raw)
    assert server.requests == 1


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    root = tmp_path / "file" / "data"
    refused(root, str(root / ARCHIVE), "cannot write there", "by hand", watch=tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_folder_that_is_empty_is_named(server: Server, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        refused(tmp_path, str(tmp_path / ARCHIVE), "cannot write there", "by hand", watch=tmp_path)
    finally:
        tmp_path.chmod(0o755)


def test_the_download_can_be_read_by_all_and_shows_progress_on_a_terminal(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data.cifar10(tmp_path / "quiet")
    assert "100%" not in capsys.readouterr().err
    assert (tmp_path / "quiet" / ARCHIVE).stat().st_mode & 0o044 == 0o044
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    data.cifar10(tmp_path / "terminal")
    assert "100%" in capsys.readouterr().err


def test_the_official_address_and_hash() -> None:
    assert data._URL == URL
    # As published by several independent readers of the archive; its MD5 is c58f30108f718f92721af3b95e74349a.
    assert data._HASH == "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
    assert data._ROWS == 10_000


# ---- hold_out


def numbered(n: int) -> data.Images:
    """Images that carry their own number, so that one can be followed through a split."""
    x = torch.arange(float(n)).reshape(n, 1, 1, 1)
    return tiny(x_train=x, y_train=torch.arange(n) % 2, x_test=-torch.ones(2, 1, 1, 1), y_test=torch.zeros(2).long())


@given(n=st.integers(2, 60), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_hold_out_splits_the_training_set(n: int, share: float, seed: int) -> None:
    images = numbered(n)
    held = 1 + int(share * (n - 2))
    split = data.hold_out(images, held, seed)
    assert (split.n, len(split.x_test), split.name) == (n - held, held, "tiny-holdout")
    x = torch.cat([split.x_train, split.x_test]).flatten().long()
    y = torch.cat([split.y_train, split.y_test])
    assert torch.equal(x.sort().values, torch.arange(n))  # each training example once, none of the real test set
    assert torch.equal(y, x % 2)  # each with its own label
    assert split.fingerprint == data.hold_out(images, held, seed).fingerprint
    assert torch.equal(images.x_train.flatten(), torch.arange(float(n)))


def test_hold_out_depends_on_the_seed() -> None:
    images = numbered(50)
    assert data.hold_out(images, 10, 0).fingerprint != data.hold_out(images, 10, 1).fingerprint


@pytest.mark.parametrize("n", [-1, 0, 3, 4])
def test_hold_out_refuses_impossible_sizes(n: int) -> None:
    with pytest.raises(ValueError, match=rf"n must be in 1\.\.2.*got {n}"):
        data.hold_out(tiny(), n, 0)


def test_hold_out_does_not_share_memory_with_the_original() -> None:
    images = numbered(5)
    split = data.hold_out(images, 2, 0)
    split.x_train.zero_()
    assert torch.equal(images.x_train.flatten(), torch.arange(5.0))
    assert replace(images, name="x").fingerprint != images.fingerprint


# ---- the real thing


@pytest.mark.cifar10
def test_the_real_cifar10(cifar10_root: Path) -> None:
    images = data.cifar10(cifar10_root)
    assert (images.n, len(images.x_test), images.shape) == (50_000, 10_000, (3, 32, 32))
    assert torch.bincount(images.y_train).tolist() == [5000] * 10
    assert torch.bincount(images.y_test).tolist() == [1000] * 10
    assert (images.x_train.min(), images.x_train.max()) == (-1, 1)
    # Known channel means of the official training images, in units of the byte range.
    means = images.x_train.mean((0, 2, 3)) / 2 + 0.5
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=2e-3, rtol=0)


def test_missing_values_are_refused_with_a_remedy():
    """Training would give their examples a gradient of zero, and say nothing."""
    x, y = torch.zeros(4, 1, 1, 3), torch.zeros(4, dtype=torch.int64)
    x[2, 0, 0, 1] = torch.nan
    with pytest.raises(data.DataError, match="x_train holds values that are not finite; put a public constant"):
        data.Images("table", x, y, x[:2], y[:2], ("one",))
    with pytest.raises(data.DataError, match=r"a table of F columns is \(N, 1, 1, F\)"):
        data.Images("table", torch.zeros(4, 3), y, torch.zeros(2, 3), y[:2], ("one",))
