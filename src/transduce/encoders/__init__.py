"""Encoders: the sources of a batch in, a memory out."""

from transduce.contracts import Encoder
from transduce.encoders.both_ways import BothWaysEncoder
from transduce.encoders.convolutional import ConvolutionalEncoder
from transduce.encoders.recurrent import RecurrentEncoder
from transduce.encoders.transformer import TransformerEncoder

ENCODERS: dict[str, type[Encoder]] = {
    "recurrent": RecurrentEncoder,
    "both_ways": BothWaysEncoder,
    "convolutional": ConvolutionalEncoder,
    "transformer": TransformerEncoder,
}
