"""Registries of modalities and front ends: a new one is one class and one row here."""

from transduce.contracts import FrontEnd, Modality
from transduce.modalities.audio.modality import (
    Audio,
    AudioFeatures,
    ConvSubsampling,
    FrameStacking,
    Waveform,
    WaveformConvolution,
    WaveformStem,
)
from transduce.modalities.image.front_ends import CNNGrid, FeatureGrid, PatchEmbedding
from transduce.modalities.image.modality import Image, ImageFeatures
from transduce.modalities.video import FrameEmbedding, TubeletEmbedding, Video

MODALITIES: dict[str, type[Modality]] = {
    "image": Image,
    "image_features": ImageFeatures,
    "audio": Audio,
    "audio_features": AudioFeatures,
    "waveform": Waveform,
    "video": Video,
}


FRONT_ENDS: dict[str, type[FrontEnd]] = {
    "patches": PatchEmbedding,
    "cnn_grid": CNNGrid,
    "feature_grid": FeatureGrid,
    "conv_subsampling": ConvSubsampling,
    "frame_stacking": FrameStacking,
    "waveform_convolution": WaveformConvolution,
    "waveform_stem": WaveformStem,
    "frames": FrameEmbedding,
    "tubelets": TubeletEmbedding,
}
