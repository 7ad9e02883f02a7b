"""Networks by name."""

from collections.abc import Mapping

from polysite.models.densenet import DenseNet
from polysite.models.unet import UNet

Model = UNet | DenseNet

MODELS: Mapping[str, Model] = {
    "unet": UNet(),
    "unet_small": UNet(filters=(16, 32, 64, 128)),
    "densenet": DenseNet(),
    "densenet_small": DenseNet(blocks=(4, 4), growth=12, features=16),
}
