"""A name in, how such sources are read out: the shelf of everything that is no text."""

from transduce.contracts import Front, Modality
from transduce.modalities.audio.front_ends import Stacked, Strided
from transduce.modalities.audio.modality import Features, Sound
from transduce.modalities.image.features import Cells, ImageFeatures
from transduce.modalities.image.front_ends import Grid, Patches
from transduce.modalities.image.modality import Image
from transduce.modalities.video.front_ends import Frames, Tubelets
from transduce.modalities.video.modality import Video

MODALITIES: dict[str, type[Modality]] = {
    "image": Image,
    "image_features": ImageFeatures,
    "sound": Sound,
    "features": Features,
    "video": Video,
}


FRONTS: dict[str, type[Front]] = {
    "patches": Patches,
    "grid": Grid,
    "cells": Cells,
    "strided": Strided,
    "stacked": Stacked,
    "frames": Frames,
    "tubelets": Tubelets,
}
