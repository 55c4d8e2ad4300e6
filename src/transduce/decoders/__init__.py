"""Decoders and their registry."""

from transduce.contracts import Decoder
from transduce.decoders.convolutional import ConvolutionalDecoder
from transduce.decoders.recurrent import RecurrentDecoder
from transduce.decoders.transformer import TransformerDecoder

DECODERS: dict[str, type[Decoder]] = {
    "recurrent": RecurrentDecoder,
    "convolutional": ConvolutionalDecoder,
    "transformer": TransformerDecoder,
}
