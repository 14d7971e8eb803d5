"""The pretrained weights that torchvision and timm publish for their architectures."""

from typing import Any

from torch import Tensor, nn

from snclr.errors import UserError, first_line
from snclr.models.encoders import EncoderSpec, resolve_encoder
from snclr.models.names import NARROW_RESNETS, NARROW_VITS

PretrainedWeights = tuple[dict[str, Tensor], tuple[float, ...], tuple[float, ...]]
"""A state dict of the library, and the mean and standard deviation its images were normalized with."""


def download_pretrained(spec: EncoderSpec) -> PretrainedWeights:
    """Return the library's default pretrained weights of `spec`, from its cache or downloaded.

    timm adapts the position embeddings of a ViT to the image size.
    """
    if spec.name in (*NARROW_RESNETS, *NARROW_VITS):
        raise UserError(
            f"there are no pretrained weights of {spec.name}; choose another encoder or give a weights file"
        )
    default = resolve_encoder(spec.name, image_size=spec.image_size).heads
    if default != spec.heads:
        raise UserError(f"the pretrained weights of {spec.name} have {default} attention heads, not {spec.heads}")
    try:
        if spec.library == "torchvision":
            import torchvision

            weights = torchvision.models.get_model_weights(spec.architecture).DEFAULT
            transform: Any = weights.transforms()
            return weights.get_state_dict(progress=True), tuple(transform.mean), tuple(transform.std)
        import timm

        model: nn.Module = timm.create_model(spec.architecture, pretrained=True, num_classes=0, **spec.model_args)
        config: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
        return model.state_dict(), tuple(config["mean"]), tuple(config["std"])
    except Exception as error:  # each hub client raises its own errors
        raise UserError(
            f"cannot get the pretrained weights of {spec.name} from {spec.library} ({first_line(error)}). "
            "Download them on another machine and give the file."
        ) from error
