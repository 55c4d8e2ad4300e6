"""A name in, how such sources are read out: the shelf of everything that is no text."""

from transduce.contracts import FrontEnd, Modality
from transduce.modalities.audio.front_ends import ConvSubsampling, FrameStacking
from transduce.modalities.audio.modality import Audio, AudioFeatures
from transduce.modalities.image.features import FeatureGrid, ImageFeatures
from transduce.modalities.image.front_ends import CNNGrid, PatchEmbedding
from transduce.modalities.image.modality import Image
from transduce.modalities.video.front_ends import FrameEmbedding, TubeletEmbedding
from transduce.modalities.video.modality import Video

MODALITIES: dict[str, type[Modality]] = {
    "image": Image,
    "image_features": ImageFeatures,
    "audio": Audio,
    "audio_features": AudioFeatures,
    "video": Video,
}


FRONT_ENDS: dict[str, type[FrontEnd]] = {
    "patches": PatchEmbedding,
    "cnn_grid": CNNGrid,
    "feature_grid": FeatureGrid,
    "conv_subsampling": ConvSubsampling,
    "frame_stacking": FrameStacking,
    "frames": FrameEmbedding,
    "tubelets": TubeletEmbedding,
}
