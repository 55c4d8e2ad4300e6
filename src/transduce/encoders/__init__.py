"""Encoders and their registry."""

from transduce.contracts import Encoder
from transduce.encoders.character_aware import CharacterAwareEncoder
from transduce.encoders.convolutional import ConvolutionalEncoder
from transduce.encoders.multi_source import IdentityEncoder, MultiSourceEncoder
from transduce.encoders.recurrent import ElmoEncoder, RecurrentEncoder
from transduce.encoders.transformer import ConformerEncoder, TransformerEncoder

ENCODERS: dict[str, type[Encoder]] = {
    "recurrent": RecurrentEncoder,
    "elmo": ElmoEncoder,
    "convolutional": ConvolutionalEncoder,
    "transformer": TransformerEncoder,
    "conformer": ConformerEncoder,
    "identity": IdentityEncoder,
    "multi_source": MultiSourceEncoder,
    "character_aware": CharacterAwareEncoder,
}
