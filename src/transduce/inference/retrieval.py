"""Sentence embeddings: storage, nearest-neighbour search, clustering."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from transduce.data.prepare import cache_folder
from transduce.data.readers.corpus import gold_similarity, in_windows, read_corpus
from transduce.data.store import checksums
from transduce.errors import InputError
from transduce.evaluation.retrieval_metrics import normalise_rows
from transduce.explain.png import fonts
from transduce.inference import Model
from transduce.recipe import parse
from transduce.storage import atomic_path, cache, open_atomic, staged_folder, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DTYPE = np.dtype("<f4")
_VECTORS = "vectors.npy"
_CHUNK = 100_000  # documents compared per matrix product
_MAX_ITERATIONS = 300  # of Lloyd's algorithm; far more than any run needs in practice


def embed_windows(model: Model, windows: Iterable[list[str]]) -> Iterator[np.ndarray]:
    """Yields embeddings (n D) in blocks of some thousand lines: one row per line, in order."""
    return map(model.embed, windows)


def write_npy(blocks: Iterable[np.ndarray], path: Path) -> tuple[int, int]:
    """Streams rows to a float32 .npy file and returns (rows, width). The file appears only when it is complete."""
    rows, width = 0, 0
    with open_atomic(path) as stream:
        _write_header(stream, rows, width)
        for block in blocks:
            stream.write(np.ascontiguousarray(block, dtype=_DTYPE).tobytes())
            rows, width = rows + len(block), block.shape[1]
        stream.seek(0)
        _write_header(stream, rows, width)  # the same length as before, so no row moves
    return rows, width


_HEADER_BYTES = 128


def _write_header(stream: IO[bytes], rows: int, width: int) -> None:
    """A header of .npy format 1.0 with a fixed length, because the number of rows is known only at the end."""
    description = f"{{'descr': '{_DTYPE.str}', 'fortran_order': False, 'shape': ({rows}, {width})}}"
    magic = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    stream.write(magic + description.ljust(_HEADER_BYTES - 11).encode("ascii") + b"\n")


def cached_embeddings(model: Model, lines: list[str]) -> np.ndarray:
    """The embeddings of the lines (n D), from the cache if the same model embedded the same lines before."""
    folder = cache_folder(model.recipe.data, "vectors") / _cache_key(model, lines)
    if folder.exists():
        try:
            cache.mark_used(folder)
            return _read_vectors(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{folder}: damaged embeddings: {error}: computing them again", stacklevel=2)
    if not lines:
        raise InputError("there are no lines to embed", remedy="give a file with at least one line")
    with staged_folder(folder) as part:
        rows, width = write_npy(embed_windows(model, in_windows(lines)), part / _VECTORS)
        meta = {"names": [f"{rows:,} lines, {width} numbers each"], "checksums": checksums(part, [_VECTORS])}
        write_file(part / cache.META, json.dumps(meta).encode())
    cache.entry_added(folder)
    return _read_vectors(folder)


def _read_vectors(folder: Path) -> np.ndarray:
    expected = json.loads((folder / cache.META).read_bytes())["checksums"]
    if checksums(folder, [_VECTORS]) != expected:
        raise ValueError(f"{_VECTORS} differs from what was written")
    vectors: np.ndarray = np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False)
    return vectors


def _cache_key(model: Model, lines: list[str]) -> str:
    """A hash of everything that the vectors depend on: model options, vocabulary, weights, text, stamps of files."""
    settings = [
        model.recipe.model.model_dump(mode="json"),
        model.recipe.generation.max_source_length,
        model.source.fingerprint,
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.network.state_dict().items()):
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    for line in lines:
        digest.update(line.encode() + b"\n")
        if not model.source_encoding.reads_text:
            for file in filter(Path.is_file, map(Path, line.split("\t"))):
                digest.update(f"{file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Hit:
    """A document in the result of a query: its row, counted from 0, and the cosine similarity."""

    row: int
    cosine: float


def nearest_neighbours(queries: np.ndarray, documents: np.ndarray, top: int) -> list[list[Hit]]:
    """The `top` documents (M D) most similar to each query (Q D), the best first; ties are won by the lower row."""
    queries = normalise_rows(queries)
    best = np.full((len(queries), 0), -np.inf, dtype=np.float32)  # Q K: the best cosines so far
    rows = np.zeros((len(queries), 0), dtype=np.int64)
    for start in range(0, len(documents), _CHUNK):
        chunk = normalise_rows(np.asarray(documents[start : start + _CHUNK]))
        best = np.concatenate((best, queries @ chunk.T), 1)
        new_rows = np.broadcast_to(np.arange(start, start + len(chunk)), (len(queries), len(chunk)))
        rows = np.concatenate((rows, new_rows), 1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :top]  # stable: among ties the lower row stays first
        best, rows = np.take_along_axis(best, order, 1), np.take_along_axis(rows, order, 1)
    return [
        [Hit(int(row), float(cosine)) for row, cosine in zip(*ranking, strict=True)]
        for ranking in zip(rows, best, strict=True)
    ]


@dataclass(frozen=True)
class PairSimilarity:
    """The cosine similarity of a sentence pair, and the gold similarity where there is one."""

    cosine: float
    gold: float | None


def pair_similarities(model: Model, pairs: str) -> Iterator[PairSimilarity]:
    """The similarity of each pair of a file. The gold similarity is the third column, or the field `score`."""
    (corpus,) = parse({"data": {"test": pairs}}).data.test
    examples = list(read_corpus(corpus, model.recipe.data.invalid))
    texts = [[example.source for example in examples], [example.target or "" for example in examples]]
    sides = zip((model.embed, model.embed_targets), texts, strict=True)
    blocks = ([embed(window) for window in in_windows(side)] for embed, side in sides)
    first, second = (normalise_rows(np.concatenate(side)) for side in blocks)
    golds = [gold_similarity(example) for example in examples]
    if len({gold is None for gold in golds}) > 1:
        line = examples[golds.index(None)].line
        raise InputError(
            "this line has no gold similarity, but other lines have one",
            where=f"{pairs}:{line}",
            remedy="give all lines a third column, or none",
        )
    for cosine, gold in zip((first * second).sum(-1).tolist(), golds, strict=True):
        yield PairSimilarity(cosine, gold)


@dataclass(frozen=True)
class Clustering:
    """The cluster of each vector. Clusters are numbered by size, the largest first."""

    labels: np.ndarray  # n
    centres: np.ndarray  # k D
    cost: float  # sum of squared distances to the centres

    def nearest_members(self, vectors: np.ndarray, cluster: int, count: int) -> list[int]:
        """The rows of the members nearest to the centre of a cluster, the nearest first."""
        members = np.flatnonzero(self.labels == cluster)
        distances = _squared_distances(vectors[members], self.centres[cluster : cluster + 1])[:, 0]
        return [int(row) for row in members[np.argsort(distances, kind="stable")][:count]]


def k_means(vectors: np.ndarray, k: int, seed: int = 1, restarts: int = 10) -> Clustering:
    """k-means (Lloyd 1982) with k-means++ initialisation (Arthur & Vassilvitskii 2007); the best of several restarts.

    No cluster is empty. There must be at least k distinct vectors.
    """
    points = np.asarray(vectors, dtype=np.float64)
    distinct = len(np.unique(points, axis=0))
    if not 1 <= k <= distinct:
        raise InputError(f"{k} clusters for {distinct} distinct vectors", remedy=f"request 1 to {distinct} clusters")
    generator = np.random.default_rng(seed)
    best = min(
        (_lloyd(points, _k_means_plus_plus(points, k, generator)) for _ in range(restarts)), key=lambda one: one.cost
    )
    order = np.argsort(-np.bincount(best.labels, minlength=k), kind="stable")
    return Clustering(np.argsort(order)[best.labels], best.centres[order], best.cost)


def _squared_distances(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """n k: |x|^2 - 2 x.c + |c|^2, without an array of shape n k D."""
    squares = (points**2).sum(1)[:, None] - 2 * points @ centres.T + (centres**2).sum(1)
    result: np.ndarray = np.maximum(squares, 0.0)
    return result


def _k_means_plus_plus(points: np.ndarray, k: int, generator: np.random.Generator) -> np.ndarray:
    """Initial centres: each further one is a point drawn with probability proportional to its squared distance."""
    chosen = [int(generator.integers(len(points)))]
    distances = ((points - points[chosen[0]]) ** 2).sum(1)
    for _ in range(k - 1):
        chosen.append(int(generator.choice(len(points), p=distances / distances.sum())))
        # Exact differences: the expanded form of _squared_distances would leave a small probability on chosen centres.
        distances = np.minimum(distances, ((points - points[chosen[-1]]) ** 2).sum(1))
    return points[chosen]


def _lloyd(points: np.ndarray, centres: np.ndarray) -> Clustering:
    """Alternates assignment to the nearest centre and recomputation of the centres until convergence."""
    labels = np.full(len(points), -1)
    for _ in range(_MAX_ITERATIONS):
        distances = _squared_distances(points, centres)
        nearest = distances.argmin(1)
        _refill_empty_clusters(nearest, distances, len(centres))
        if (nearest == labels).all():
            break
        labels = nearest
        centres = np.stack([points[labels == number].mean(0) for number in range(len(centres))])
    cost = float(((points - centres[labels]) ** 2).sum())
    return Clustering(labels, centres, cost)


def _refill_empty_clusters(labels: np.ndarray, distances: np.ndarray, k: int) -> None:
    """Gives each empty cluster the point farthest from its centre, taken from a cluster with several points."""
    for number in range(k):
        if not (labels == number).any():
            own_distance = distances[np.arange(len(labels)), labels]
            movable = np.bincount(labels, minlength=k)[labels] > 1
            labels[int(np.where(movable, own_distance, -1.0).argmax())] = number


def purity(labels: Sequence[int] | np.ndarray, topics: Sequence[str]) -> float:
    """The fraction of members that belong to the most frequent topic of their cluster."""
    members: dict[int, list[str]] = {}
    for label, topic in zip(labels, topics, strict=True):
        members.setdefault(int(label), []).append(topic)
    return sum(max(map(one.count, set(one))) for one in members.values()) / len(topics)


_INK, _PALE = "#222222", "#777777"
_COLOURS = (
    "#3b5bdb",
    "#e8590c",
    "#2b8a3e",
    "#ae3ec9",
    "#0c8599",
    "#c92a2a",
    "#f08c00",
    "#5f3dc4",
    "#868e96",
    "#a61e4d",
)


@dataclass(frozen=True)
class Projection:
    """Vectors in two dimensions."""

    points: np.ndarray  # n 2
    explained_variance: float  # fraction of the variance along the two axes


def pca(vectors: np.ndarray) -> Projection:
    """Projection on the first two principal components (Pearson 1901)."""
    centred = np.asarray(vectors, dtype=np.float64) - np.mean(vectors, axis=0, dtype=np.float64)
    if centred.shape[1] == 1:
        centred = np.pad(centred, ((0, 0), (0, 1)))
    values, axes = np.linalg.eigh(centred.T @ centred)  # in ascending order
    plane = axes[:, [-1, -2]]
    plane *= np.sign(plane[np.abs(plane).argmax(0), [0, 1]])  # the sign of an axis is arbitrary: fix it
    total = float(np.maximum(values, 0).sum())
    return Projection(centred @ plane, float(values[-2:].sum()) / total if total else 1.0)


def distinctive_words(lines: Sequence[str], labels: np.ndarray, cluster: int, count: int = 3) -> list[str]:
    """Words frequent in a cluster and rare elsewhere: by n log(p(word | cluster) / p(word))^2, n lines with the word.

    Without the square, function words that are slightly more frequent in the cluster would win by their counts.
    """
    words = [set(re.findall(r"\w+", line.lower())) for line in lines]
    frequency = Counter(word for line in words for word in line)
    members = np.flatnonzero(labels == cluster)
    cluster_frequency = Counter(word for row in members for word in words[row])

    def score(word: str) -> float:
        ratio = math.log(cluster_frequency[word] * len(lines) / (len(members) * frequency[word]))
        return cluster_frequency[word] * ratio * abs(ratio)

    return sorted(cluster_frequency, key=lambda word: (-score(word), word))[:count]


def draw_map(vectors: np.ndarray, lines: Sequence[str], clustering: Clustering, path: Path) -> None:
    """Draws one point per line, coloured by cluster; each cluster is labelled with its distinctive words."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    projection = pca(vectors)
    figure = Figure(figsize=(9, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    size = float(np.clip(14_000 / max(len(lines), 1), 3, 36))
    for number in range(len(clustering.centres)):
        points = projection.points[clustering.labels == number]
        axes.scatter(
            points[:, 0], points[:, 1], s=size, color=_COLOURS[number % len(_COLOURS)], alpha=0.55, linewidths=0
        )
    _write_labels(axes, projection.points, lines, clustering)
    axes.set_title(
        f"{len(lines):,} lines in {len(clustering.centres)} clusters", loc="left", fontsize=12, color=_INK, pad=10
    )
    variance = f"the first two principal components explain {projection.explained_variance:.0%} of the variance"
    axes.set_xlabel(variance, fontsize=8, color=_PALE)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.12)
    for spine in axes.spines.values():
        spine.set_visible(False)
    with atomic_path(path) as part:
        figure.savefig(part)


def _write_labels(axes: Axes, points: np.ndarray, lines: Sequence[str], clustering: Clustering) -> None:
    """Places each label at the median of its cluster; labels that would overlap are moved upwards."""
    clusters = range(len(clustering.centres))
    medians = np.array([np.median(points[clustering.labels == number], axis=0) for number in clusters])
    width, height = np.ptp(points, axis=0)
    placed: list[tuple[float, float]] = []
    for number in sorted(clusters, key=lambda number: medians[number, 1]):
        x, y = medians[number]
        for other_x, other_y in sorted(placed, key=lambda position: position[1]):
            if abs(x - other_x) < 0.3 * width and y - other_y < 0.06 * height:
                y = other_y + 0.06 * height
        placed.append((x, y))
        words = ", ".join(distinctive_words(lines, clustering.labels, number))
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        colour = _COLOURS[number % len(_COLOURS)]
        text = axes.text(x, y, f"{number + 1}  {words}", color=colour, fontsize=9.5, ha="center", va="center", bbox=box)
        text.set(fontfamily=list(fonts()), fontweight="bold", parse_math=False)
