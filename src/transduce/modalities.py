"""A name in, how such sources are read out: the shelf of everything that is no text."""

from transduce.contracts import Modality
from transduce.images.features import ImageFeatures
from transduce.images.modality import Image
from transduce.sound.modality import Features, Sound
from transduce.video.modality import Video

MODALITIES: dict[str, type[Modality]] = {
    "image": Image,
    "image_features": ImageFeatures,
    "sound": Sound,
    "features": Features,
    "video": Video,
}
