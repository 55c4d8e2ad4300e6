"""Encoders: the sources of a batch in, a memory out."""

from transduce.contracts import Encoder
from transduce.encoders.both_ways import BothWaysEncoder
from transduce.encoders.conformer import ConformerEncoder
from transduce.encoders.convolutional import ConvolutionalEncoder
from transduce.encoders.joined import JoinedEncoder
from transduce.encoders.plain import PlainEncoder
from transduce.encoders.recurrent import RecurrentEncoder
from transduce.encoders.transformer import TransformerEncoder

ENCODERS: dict[str, type[Encoder]] = {
    "recurrent": RecurrentEncoder,
    "both_ways": BothWaysEncoder,
    "convolutional": ConvolutionalEncoder,
    "transformer": TransformerEncoder,
    "conformer": ConformerEncoder,
    "plain": PlainEncoder,
    "joined": JoinedEncoder,
}
