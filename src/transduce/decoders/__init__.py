"""Decoders and their registry."""

from transduce.contracts import Decoder
from transduce.decoders.convolutional import ConvolutionalDecoder
from transduce.decoders.latent_alignment import EditTransducerDecoder, HardAttentionDecoder
from transduce.decoders.recurrent import RecurrentDecoder
from transduce.decoders.transformer import PrefixDecoder, TransformerDecoder

DECODERS: dict[str, type[Decoder]] = {
    "recurrent": RecurrentDecoder,
    "convolutional": ConvolutionalDecoder,
    "edit_transducer": EditTransducerDecoder,
    "hard_attention": HardAttentionDecoder,
    "transformer": TransformerDecoder,
    "prefix": PrefixDecoder,
}
