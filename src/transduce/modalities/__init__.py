"""Registries of modalities and front ends: a new one is one class and one row here."""

from transduce.contracts import FrontEnd, Modality
from transduce.modalities.audio import (
    Audio,
    AudioFeatures,
    Conv2dSubsampling,
    ConvSubsampling,
    FrameStacking,
    Waveform,
    WaveformConvolution,
    WaveformStem,
)
from transduce.modalities.image import CNNGrid, FeatureGrid, Image, ImageFeatures, PatchEmbedding
from transduce.modalities.image_patches import FlattenedPatches, ImagePatches
from transduce.modalities.swin import SwinTransformer
from transduce.modalities.video import FrameEmbedding, TubeletEmbedding, Video

MODALITIES: dict[str, type[Modality]] = {
    "image": Image,
    "image_features": ImageFeatures,
    "image_patches": ImagePatches,
    "audio": Audio,
    "audio_features": AudioFeatures,
    "waveform": Waveform,
    "video": Video,
}


FRONT_ENDS: dict[str, type[FrontEnd]] = {
    "patches": PatchEmbedding,
    "flattened_patches": FlattenedPatches,
    "cnn_grid": CNNGrid,
    "feature_grid": FeatureGrid,
    "swin": SwinTransformer,
    "conv_subsampling": ConvSubsampling,
    "conv2d_subsampling": Conv2dSubsampling,
    "frame_stacking": FrameStacking,
    "waveform_convolution": WaveformConvolution,
    "waveform_stem": WaveformStem,
    "frames": FrameEmbedding,
    "tubelets": TubeletEmbedding,
}
