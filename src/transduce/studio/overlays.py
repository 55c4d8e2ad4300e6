"""Attention over images and recordings: cells on a picture, columns of a spectrogram, and the sound itself."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Response

from transduce.contracts import VisualSource
from transduce.errors import InputError
from transduce.explain.attention import Explanation, combine_heads
from transduce.explain.records import picture_record
from transduce.inference import Model
from transduce.modalities.audio import Audio, Waveform
from transduce.modalities.source_encoding import ModalitySourceEncoding
from transduce.studio.attention import Text
from transduce.studio.runs import Studio


@dataclass(frozen=True)
class Box:
    """Part of a picture, in pixels: left and top are inside, right and bottom are not."""

    left: float
    top: float
    right: float
    bottom: float


def cell_box(source: VisualSource, cell: int) -> Box:
    """The pixels of one cell of the grid, in reading order."""
    (rows, columns), (height, width) = source.grid, source.pixels.shape[:2]
    row, column = divmod(cell, columns)
    across, down = width / columns, height / rows
    return Box(column * across, row * down, (column + 1) * across, (row + 1) * down)


def column_at(source: VisualSource, seconds: float) -> int:
    """The column of a spectrogram that sounds at a time."""
    columns = source.grid[1]
    return min(max(int(seconds / source.extent * columns), 0), columns - 1) if source.extent > 0 else 0


def overlay_weights(explained: Explanation, source: VisualSource, weights: np.ndarray) -> np.ndarray:
    """T Y X: the weights (T S) of the memory rows that are cells of this picture."""
    rows, columns = source.grid
    cells = weights[:, source.begin : source.begin + rows * columns]
    return cells.reshape(len(weights), rows, columns)


def overlays(
    explained: Explanation,
    layer: int | Literal["mean", "last"] = "mean",
    head: int | Literal["mean"] = "mean",
) -> dict[str, Any]:
    """The pictures of a source, each with a map for every output token: attention, or the first attribution."""
    if not explained.visual_sources:
        raise InputError("this source is not a picture or a recording", remedy="choose a run that reads one")
    method, (layers, heads), tokens = "attention", (1, 1), list(explained.target_tokens)
    if explained.attention is not None:
        layers, heads = explained.attention.shape[:2]
        weights = combine_heads(explained.attention, layer, head)
    elif explained.attributions:
        method = next(iter(explained.attributions))
        tokens = [token for token in tokens if token != "</s>"]  # the end of a label depends on nothing
        weights = explained.attribution_map(method).weights[: len(tokens)]
    else:
        raise InputError("this model has no attention over its source", remedy="choose a run that attends")
    return {
        "output": explained.output,
        "tokens": tokens,
        "method": method,
        "layers": layers,
        "heads": heads,
        "pictures": [_picture(explained, one, weights) for one in explained.visual_sources],
    }


def _picture(explained: Explanation, source: VisualSource, weights: np.ndarray) -> dict[str, Any]:
    maps = overlay_weights(explained, source, weights)
    return {
        **picture_record(source),
        "maps": maps.reshape(len(maps), -1).tolist(),
        "peaks": [vars(cell_box(source, int(one.argmax()))) for one in maps],
        "mass": maps.sum((1, 2)).tolist(),
    }


def recording(model: Model, text: str) -> bytes:
    """The sound of a source as a WAV file, as the model reads it: one channel at its own rate."""
    encoding = model.source_encoding
    parts = encoding.source.parts.values() if isinstance(encoding, ModalitySourceEncoding) else ()
    for column, modality in enumerate(parts):
        if isinstance(modality, (Audio, Waveform)):
            (item,) = encoding.encode([text])
            stream = io.BytesIO()
            with wave.open(stream, "wb") as written:
                written.setnchannels(1)
                written.setsampwidth(2)
                written.setframerate(modality.rate)
                written.writeframes(np.asarray(item.parts[column], "<i2").tobytes())
            return stream.getvalue()
    raise InputError("this model does not hear", remedy="choose a run whose sources are recordings")


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.get("/overlays")
    def pictures(
        run: str = "", source: Text = "", target: Text = "", layer: str = "mean", head: str = "mean"
    ) -> dict[str, Any]:
        explained = studio.run(run).explanation(source, target)
        return overlays(explained, _number(layer), _number(head))

    @routes.get("/recording")
    def sound(run: str = "", source: Text = "") -> Response:
        return Response(recording(studio.run(run).model, source), media_type="audio/wav")

    return routes


def _number(name: str) -> Any:
    return int(name) if name.isdigit() else name
