"""Networks by name."""

from collections.abc import Mapping

from polysite.models.densenet import DenseNet
from polysite.models.ensemble import Ensemble
from polysite.models.monai import Monai
from polysite.models.sub_encoders import DenseNetSub, UNetSub
from polysite.models.unet import UNet

Model = UNet | DenseNet | UNetSub | DenseNetSub | Monai | Ensemble

MODELS: Mapping[str, UNet | DenseNet | UNetSub | DenseNetSub] = {  # networks that can be trained
    "unet": UNet(),
    "unet_small": UNet(filters=(16, 32, 64, 128)),
    "densenet": DenseNet(),
    "densenet_small": DenseNet(blocks=(4, 4), growth=12, features=16),
    "unet_sub": UNetSub(),
    "unet_small_sub": UNetSub(filters=(16, 32, 64, 128)),
    "densenet_sub": DenseNetSub(),
    "densenet_small_sub": DenseNetSub(blocks=(4, 4), growth=12, features=16),
}
CHOICES: Mapping[str, Model | type[Ensemble] | type[Monai]] = {**MODELS, "monai": Monai, "ensemble": Ensemble}
