"""Networks by name."""

from polysite.models.unet import UNet

MODELS = {
    "unet": UNet(),
    "unet_small": UNet(filters=(16, 32, 64, 128)),
}
