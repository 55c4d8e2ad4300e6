"""Encoders: the sources of a batch in, a memory out."""

from transduce.contracts import Encoder
from transduce.encoders.conformer import ConformerEncoder
from transduce.encoders.convolutional import ConvolutionalEncoder
from transduce.encoders.elmo import BothWaysEncoder
from transduce.encoders.identity import PlainEncoder
from transduce.encoders.multi_source import JoinedEncoder
from transduce.encoders.recurrent import RecurrentEncoder
from transduce.encoders.transformer import TransformerEncoder

ENCODERS: dict[str, type[Encoder]] = {
    "recurrent": RecurrentEncoder,
    "elmo": BothWaysEncoder,
    "convolutional": ConvolutionalEncoder,
    "transformer": TransformerEncoder,
    "conformer": ConformerEncoder,
    "plain": PlainEncoder,
    "joined": JoinedEncoder,
}
