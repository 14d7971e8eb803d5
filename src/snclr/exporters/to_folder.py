"""safetensors and timm: a folder with the weights and config.json, as in the run directory."""

import json
from pathlib import Path
from typing import Any

import timm
from torch import nn

from snclr.checkpoint import encoder_file
from snclr.errors import UserError
from snclr.exporters.format import Format
from snclr.models.encoders import EncoderSpec


class Safetensors(Format):
    """The two files of a run, written again rather than copied, so that an edited config.json is not copied."""

    def write(self, encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
        """Write both files."""
        encoder_file.save_encoder(encoder, spec, folder, extra=extra)

    def reload(self, spec: EncoderSpec, folder: Path) -> nn.Module:
        """Load the folder as a run; its description must be that of the encoder."""
        encoder, described = encoder_file.load_encoder(folder)
        if described != spec:
            raise UserError("config.json describes another encoder")
        return encoder

    def snippet(self, spec: EncoderSpec, folder: Path, **fields: Any) -> str:
        """Return code for safetensors and timm or torchvision."""
        return encoder_file.loading_snippet(spec, folder)


class Timm(Format):
    """A folder for timm's `local-dir:`; the Hugging Face Hub uses the same two files."""

    template = """\
import timm

# pretrained=True loads the weights; num_classes=N adds a new classifier
encoder = timm.create_model(
    {local_dir!r},
    pretrained=True, num_classes=0,
)
encoder.eval()
"""

    def refusal(self, spec: EncoderSpec) -> str | None:
        """Refuse low-resolution stems, and models whose weights timm misreads."""
        if spec.stem != "standard":
            return f"timm has no {spec.name} with the low-resolution stem {spec.stem!r}"
        if not encoder_file.timm_reads_folder(spec):
            return f"timm reads weights of {spec.architecture} without a classifier as those of an older layout"
        return None

    def write(self, encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
        """Write the weights, and config.json with the model arguments that shapes do not show (the heads of a ViT)."""
        encoder_file.save_encoder(encoder, spec, folder, extra=extra)
        # timm and the hub try this name first.
        (folder / encoder_file.WEIGHTS_NAME).rename(folder / "model.safetensors")
        config = json.loads((folder / encoder_file.CONFIG_NAME).read_bytes())
        # timm needs these two names to add a classifier (num_classes=N) or to change the channels (in_chans=N).
        if (known := timm.get_pretrained_cfg(spec.architecture)) is not None:
            if isinstance(known.classifier, str):
                config["pretrained_cfg"]["classifier"] = known.classifier
            if f"{known.first_conv}.weight" in encoder.state_dict():
                config["pretrained_cfg"]["first_conv"] = known.first_conv
        (folder / encoder_file.CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")

    def reload(self, spec: EncoderSpec, folder: Path) -> nn.Module:
        """Load the folder with timm."""
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0)
        return model.eval()
