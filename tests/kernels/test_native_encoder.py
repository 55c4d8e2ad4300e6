"""Native encoder blocks: equal to the modules, and independent of the other sources of a batch."""

from __future__ import annotations

import pytest
import torch

from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import PAD, Batch, Padded
from transduce.inference.lowering import NativeEncoderBlock, lower_network
from transduce.kernels.native.library import library
from transduce.layers.embedding import Embedding

LENGTHS = [
    [1],
    [7, 1, 30, 16],
    [33, 2, 65, 40, 128, 3, 9, 61, 17, 50],
]  # fewer rows than one kernel tile, and more


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
@pytest.mark.parametrize(
    "options",
    [{"heads": 2, "width": 128}, {"heads": 3, "width": 60, "norm": "post"}, {"heads": 1, "width": 32, "gated": True}],
    ids=str,
)
def test_a_native_encoder_equals_its_modules(lengths: list[int], options: dict[str, object]) -> None:
    torch.manual_seed(len(lengths))
    embedding = Embedding(50, int(str(options["width"])))
    plain = TransformerEncoder(embedding, layers=2, ff_width=48, activation="gelu", **options).eval()  # type: ignore[arg-type]
    made = lower_network(plain, "fp32")
    assert all(isinstance(block, NativeEncoderBlock) for block in made.layers)
    rows = [torch.randint(4, 50, (length,)).tolist() for length in lengths]
    source = Padded.from_rows(rows, PAD)
    with torch.inference_mode():
        before, after = plain(Batch(source)), made(Batch(source))
        alone = [made(Batch(Padded.from_rows([row]))).values[0] for row in rows]
    assert torch.allclose(after.values[source.mask], before.values[source.mask], atol=1e-4)
    assert torch.allclose(after.summary, before.summary, atol=1e-4)
    assert torch.equal(torch.cat(alone), after.values[source.mask])
    assert after.values.isfinite().all()
