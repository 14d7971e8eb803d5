"""Features of a set of images as one file, with the names of the images and what the features come from."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from snclr.durable import explain_unwritable, replacing, write_atomic
from snclr.errors import UserError

FORMATS = (".npy", ".npz", ".parquet")
UNWRITABLE = "choose another place for --out"
_META = "snclr"  # under which name parquet keeps our metadata

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Embeddings:
    """Features (n, d) float32 of the images `keys` (n), with class names where known, and where they come from.

    `metadata` are JSON values: encoder, run, weights_sha256, image_size, normalize, data, split, fingerprint, skipped …
    """

    features: Matrix
    keys: list[str]
    labels: list[str | None] | None
    metadata: dict[str, Any]


def check_out(path: Path | str) -> Path:
    """The path, if it is that of a file of a known kind; asked before hours of computing, not after."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise UserError(
            f"{path} ends in {path.suffix or 'nothing'!r}; the ending says the format: {', '.join(FORMATS)}"
        )
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file to write")
    if path.suffix.lower() == ".parquet":
        _pyarrow("pyarrow")
    return path


def keys_file(path: Path | str) -> Path:
    """Where the names of a .npy file's rows are.

    >>> keys_file("out/features.npy").as_posix()
    'out/features.keys.json'
    """
    return Path(path).with_suffix(".keys.json")


def write_embeddings(path: Path | str, embeddings: Embeddings) -> None:
    """Write the file, by its ending .npy (with a .keys.json beside it), .npz or .parquet; a crash leaves the old one.

    >>> import tempfile; place = Path(tempfile.mkdtemp()) / "a.npz"
    >>> write_embeddings(place, Embeddings(np.eye(2, dtype=np.float32), ["x.png", "y.png"], None, {"run": "r"}))
    >>> read_embeddings(place).keys
    ['x.png', 'y.png']
    """
    path = check_out(path)
    assert embeddings.features.shape[:1] == (len(embeddings.keys),)
    kind = path.suffix.lower()
    write = {".npy": _write_npy, ".npz": _write_npz, ".parquet": _write_parquet}[kind]
    with explain_unwritable(path, UNWRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, embeddings.features.nbytes) as file:
            write(file, embeddings)
        if kind == ".npy":
            names = {
                "metadata": embeddings.metadata,
                "keys": embeddings.keys,
                "labels": embeddings.labels,
                # Two files cannot be replaced in one step: the hash tells a pair that does not belong together.
                "features_sha256": _digest(embeddings.features),
            }
            write_atomic(keys_file(path), json.dumps(names, indent=1) + "\n")


def read_embeddings(path: Path | str) -> Embeddings:
    """Read what `write_embeddings` wrote, in any of its formats; nothing in the file is trusted or executed."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}; write one with snclr embed")
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise UserError(f"{path} is not a file of snclr embed; these end in {', '.join(FORMATS)}")
    try:
        found = {".npy": _read_npy, ".npz": _read_npz, ".parquet": _read_parquet}[kind](path)
    except UserError:
        raise
    except Exception as error:  # numpy and pyarrow raise almost anything on damaged files
        raise UserError(f"{path} cannot be read as a file of snclr embed ({error}); write it again") from error
    shape_fits = found.features.ndim == 2 and len(found.features) == len(found.keys)
    labels_fit = found.labels is None or len(found.labels) == len(found.keys)
    if not (shape_fits and labels_fit and all(isinstance(key, str) for key in found.keys)):
        raise UserError(f"{path} is not whole: features and names do not fit together; write it again with snclr embed")
    # Our own copy: pyarrow's memory cannot be written to, which torch does not like.
    return dataclasses.replace(found, features=np.require(found.features, np.float32, ["C", "W"]))


def _write_npy(file: BinaryIO, embeddings: Embeddings) -> None:
    np.save(file, embeddings.features, allow_pickle=False)


def _write_npz(file: BinaryIO, embeddings: Embeddings) -> None:
    columns = {"features": embeddings.features, "keys": np.array(embeddings.keys, dtype=np.str_)}
    if embeddings.labels is not None:
        columns["labels"] = np.array([label or "" for label in embeddings.labels], dtype=np.str_)
        columns["labelled"] = np.array([label is not None for label in embeddings.labels])
    np.savez(file, metadata=np.array(json.dumps(embeddings.metadata)), **columns)  # type: ignore[arg-type]


def _write_parquet(file: BinaryIO, embeddings: Embeddings) -> None:
    pa, parquet = _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")
    width = embeddings.features.shape[1]
    columns = {"key": pa.array(embeddings.keys, pa.string())}
    if embeddings.labels is not None:
        columns["label"] = pa.array(embeddings.labels, pa.string())
    values = pa.array(np.ascontiguousarray(embeddings.features).reshape(-1))
    columns["feature"] = pa.FixedSizeListArray.from_arrays(values, width)
    table = pa.table(columns).replace_schema_metadata({_META: json.dumps(embeddings.metadata)})
    parquet.write_table(table, file)


def _read_npy(path: Path) -> Embeddings:
    beside = keys_file(path)
    if not beside.is_file():
        raise UserError(f"{path} comes without {beside.name}, which names its rows; write both again with snclr embed")
    names = json.loads(beside.read_text(encoding="utf-8"))
    with open(path, "rb") as raw:
        features: Matrix = np.load(raw, allow_pickle=False)
    if names["features_sha256"] != _digest(features):
        raise UserError(f"{path} and {beside.name} are not of the same snclr embed; write both again")
    return Embeddings(features, names["keys"], names["labels"], names["metadata"])


def _read_npz(path: Path) -> Embeddings:
    with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:  # numpy leaves a damaged file open
        labels = None
        if "labels" in file:
            pairs = zip(file["labels"].tolist(), file["labelled"].tolist(), strict=True)
            labels = [label if known else None for label, known in pairs]
        return Embeddings(file["features"], file["keys"].tolist(), labels, json.loads(str(file["metadata"])))


def _read_parquet(path: Path) -> Embeddings:
    table = _pyarrow("pyarrow.parquet").read_table(path)
    column = table.column("feature").combine_chunks()
    features: Matrix = column.flatten().to_numpy().reshape(len(table), column.type.list_size)
    labels = table.column("label").to_pylist() if "label" in table.column_names else None
    metadata = json.loads(table.schema.metadata[_META.encode()])
    return Embeddings(features, table.column("key").to_pylist(), labels, metadata)


def _digest(features: Matrix) -> str:
    return hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError("parquet files need pyarrow: pip install 'snclr[parquet]', or use .npy or .npz") from error
