"""`snclr embed`: the features of a dataset as one file, with image keys, labels and metadata."""

import dataclasses
import importlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from snclr import __version__
from snclr.data.datasets.base import open_dataset
from snclr.data.transforms.views import MEAN, STD
from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, neighbor_graph
from snclr.evaluation.analysis.layout import UMAP_NEIGHBORS, pca, umap_layout
from snclr.evaluation.results import FORMATS, EmbedResult
from snclr.evaluation.session import Session, data_of, run_encoder
from snclr.evaluation.state import on_rank_zero
from snclr.io.atomic import atomic_writer, check_file_name, check_writable, explain_unwritable, write_atomic
from snclr.io.hashing import sha256_bytes, weights_digest

LAYOUTS = ("none", "pca", "umap")
_UNWRITABLE = "choose another --out"
_METADATA = "snclr"  # key of our metadata in the parquet schema

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Embeddings:
    """Features (n, d) float32 of the images `keys` (n), with class names if known.

    `metadata` are JSON values: encoder, run, weights_sha256, image_size, normalize, data, split, fingerprint, skipped …
    """

    features: Matrix
    keys: list[str]
    labels: list[str | None] | None
    metadata: dict[str, Any]
    layout: Matrix | None = None
    """(n, 2), written to parquet files only."""
    neighbors: Graph | None = None
    """Rows and cosines (n, k) of the nearest images, written to parquet files only."""


def embed_dataset(
    session: Session, *, out: str | Path, data: str | None, split: str, normalize: bool, batch_size: int,
    layout: str = "none", neighbors: int = 0, overwrite: bool = False,
) -> EmbedResult:  # fmt: skip
    """Write the features of every readable image's center crop to a file."""
    path = check_file_name(out, FORMATS)
    if path.suffix.lower() == ".parquet":
        _pyarrow("pyarrow")  # before the features are computed
    if layout not in LAYOUTS:
        raise UserError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    on_rank_zero(lambda: check_writable(path, _UNWRITABLE, overwrite=overwrite))
    (encoder, spec), dataset = session.open(
        lambda: (run_encoder(session.run), open_dataset(data or data_of(session.run), split=split, download=True))
    )
    extracted = session.features(encoder, dataset, image_size=spec.image_size, batch_size=batch_size)
    features = F.normalize(extracted.features, dim=1) if normalize else extracted.features
    metadata = {
        "snclr": __version__,
        "run": str(session.run),
        "encoder": spec.name,
        "features": features.shape[1],
        "weights_sha256": weights_digest(encoder.state_dict()),
        "image_size": spec.image_size,
        "mean": list(MEAN),
        "std": list(STD),
        "view": "center crop",
        "normalize": normalize,
        "data": dataset.name,
        "split": split,
        "fingerprint": dataset.fingerprint(),
        "skipped": [asdict(skip) for skip in extracted.skipped],
    }
    ids = extracted.ids.tolist()
    keys = [dataset.key(index) for index in ids]
    labels = None if dataset.labels is None else [dataset.class_name(index) for index in ids]
    embeddings = Embeddings(features.numpy(), keys, labels, metadata)

    def write() -> dict[str, Any]:
        shown = _with_layout(embeddings, layout, neighbors) if path.suffix.lower() == ".parquet" else embeddings
        write_embeddings(path, shown)
        return shown.metadata

    metadata = on_rank_zero(write)
    names = str(keys_file(path)) if path.suffix.lower() == ".npy" else None
    return EmbedResult(str(path), names, len(keys), metadata)


def _with_layout(embeddings: Embeddings, layout: str, neighbors: int) -> Embeddings:
    """Add a 2-D layout and the nearest images, for viewers of embeddings."""
    features = torch.from_numpy(embeddings.features)
    if len(features) < 3:
        return embeddings
    if neighbors or layout == "umap":
        graph = neighbor_graph(features, max(neighbors, UMAP_NEIGHBORS if layout == "umap" else 0))
        if neighbors:
            near = Graph(graph.cosine[:, :neighbors], graph.index[:, :neighbors])
            embeddings = dataclasses.replace(embeddings, neighbors=near)
    if layout == "none":
        return embeddings
    placed = umap_layout(features, graph) if layout == "umap" else pca(features)
    metadata = embeddings.metadata | {"layout": placed.description}
    return dataclasses.replace(embeddings, metadata=metadata, layout=placed.points)


def keys_file(path: Path | str) -> Path:
    """Return the path of the JSON file that names the rows of a .npy file.

    >>> keys_file("out/features.npy").as_posix()
    'out/features.keys.json'
    """
    return Path(path).with_suffix(".keys.json")


def write_embeddings(path: Path | str, embeddings: Embeddings) -> None:
    """Write a .npy (with a .keys.json beside it), .npz or .parquet file; each file is replaced atomically.

    >>> import tempfile; file = Path(tempfile.mkdtemp()) / "a.npz"
    >>> write_embeddings(file, Embeddings(np.eye(2, dtype=np.float32), ["x.png", "y.png"], None, {"run": "r"}))
    >>> read_embeddings(file).keys
    ['x.png', 'y.png']
    """
    path = Path(path)
    features, keys, labels, metadata = embeddings.features, embeddings.keys, embeddings.labels, embeddings.metadata
    assert features.shape[:1] == (len(keys),)
    with explain_unwritable(path, _UNWRITABLE):
        with atomic_writer(path, features.nbytes) as file:
            if path.suffix.lower() == ".npy":
                np.save(file, features, allow_pickle=False)
            elif path.suffix.lower() == ".npz":
                columns: dict[str, Any] = {"features": features, "keys": np.array(keys, dtype=np.str_)}
                if labels is not None:
                    columns["labels"] = np.array([label or "" for label in labels], dtype=np.str_)
                    columns["labeled"] = np.array([label is not None for label in labels])
                np.savez(file, metadata=np.array(json.dumps(metadata)), **columns)
            else:
                pa = _pyarrow("pyarrow")
                columns = {"key": pa.array(keys, pa.string())}
                if labels is not None:
                    columns["label"] = pa.array(labels, pa.string())
                values = pa.array(np.ascontiguousarray(features).reshape(-1))
                columns["feature"] = pa.FixedSizeListArray.from_arrays(values, features.shape[1])
                if embeddings.layout is not None:
                    columns["projection_x"] = pa.array(embeddings.layout[:, 0])
                    columns["projection_y"] = pa.array(embeddings.layout[:, 1])
                if embeddings.neighbors is not None:
                    columns["neighbors"] = _neighbors_column(pa, embeddings.neighbors)
                table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps(metadata)})
                _pyarrow("pyarrow.parquet").write_table(table, file)
        if path.suffix.lower() == ".npy":
            # Two files cannot be replaced atomically: the hash detects a mismatched pair.
            content = {
                "metadata": metadata,
                "keys": keys,
                "labels": labels,
                "features_sha256": sha256_bytes(features.tobytes()),
            }
            write_atomic(keys_file(path), json.dumps(content, indent=1) + "\n")


def read_embeddings(path: Path | str) -> Embeddings:
    """Read features, keys and metadata of a file of `write_embeddings`; its content is validated, never unpickled.

    Labels, layout and neighbors are for other programs and are not read.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}; write one with snclr embed")
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"{path} is not an embeddings file; these end in {', '.join(FORMATS)}")
    try:
        features, keys, metadata = {".npy": _read_npy, ".npz": _read_npz, ".parquet": _read_parquet}[suffix](path)
    except UserError:
        raise
    except Exception as error:  # numpy and pyarrow raise many types on damaged files
        raise UserError(f"{path} cannot be read as an embeddings file ({error}); write it again") from error
    if features.ndim != 2 or len(features) != len(keys) or not all(isinstance(key, str) for key in keys):
        raise UserError(f"{path} is damaged: features and keys do not match; write it again with snclr embed")
    # A copy of our own: memory of pyarrow is read-only, which torch rejects.
    return Embeddings(np.require(features, np.float32, ["C", "W"]), keys, None, metadata)


def _neighbors_column(pa: Any, graph: Graph) -> Any:
    """Return structs of row numbers and cosine distances, nearest first, as embedding-atlas reads them."""
    ids = pa.array(graph.index.tolist(), pa.list_(pa.int64()))
    distances = pa.array((1 - graph.cosine).clamp(min=0).tolist(), pa.list_(pa.float32()))
    return pa.StructArray.from_arrays([ids, distances], ["ids", "distances"])


def _read_npy(path: Path) -> tuple[Matrix, list[str], dict[str, Any]]:
    beside = keys_file(path)
    if not beside.is_file():
        raise UserError(f"{path} has no {beside.name}, which names its rows; write both again with snclr embed")
    names = json.loads(beside.read_text(encoding="utf-8"))
    with open(path, "rb") as raw:
        features: Matrix = np.load(raw, allow_pickle=False)
    if names["features_sha256"] != sha256_bytes(features.tobytes()):
        raise UserError(f"{path} and {beside.name} do not match; write both again with snclr embed")
    return features, names["keys"], names["metadata"]


def _read_npz(path: Path) -> tuple[Matrix, list[str], dict[str, Any]]:
    with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:  # numpy does not close a damaged file
        return file["features"], file["keys"].tolist(), json.loads(str(file["metadata"]))


def _read_parquet(path: Path) -> tuple[Matrix, list[str], dict[str, Any]]:
    table = _pyarrow("pyarrow.parquet").read_table(path)
    column = table.column("feature").combine_chunks()
    features: Matrix = column.flatten().to_numpy().reshape(len(table), column.type.list_size)
    return features, table.column("key").to_pylist(), json.loads(table.schema.metadata[_METADATA.encode()])


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError("parquet files need pyarrow: pip install 'snclr[parquet]', or use .npy or .npz") from error
