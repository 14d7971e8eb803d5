"""Print the result of `snclr demo`."""

from __future__ import annotations

from pathlib import Path

from snclr.api.demo import DemoResult, demo
from snclr.cli.flags import Command
from snclr.cli.output import print_table

_EXAMPLES = """Examples:
  snclr demo
  snclr demo --seed 1 --out runs/demo-1
"""
_INTRO = "Pre-training on 6,000 small photographs, without their labels. This takes a few minutes."


def show_demo(result: DemoResult) -> None:
    """Print the accuracies, their protocols and where the files are."""
    from snclr.checkpoint.encoder_file import load_encoder, loading_snippet

    print(f"\ntop-1 accuracy on {result.images[1]:,} test images")
    print_table(
        ["features", "kNN", "linear"],
        [(name, f"{score.knn:.1%}", f"{score.linear:.1%}") for name, score in result.table.items()],
    )
    trained = result.table["trained (SNCLR)"]
    purity = ", ".join(f"{share:.0%}" for share in result.neighbor_purity)
    print(f"\nneighbor purity, 1st to {len(result.neighbor_purity)}th neighbor: {purity}")
    print(f"\nProtocols (labels are used only here)\n  {trained.knn_protocol}\n  {trained.linear_protocol}")
    print(f"\n{result.seconds / 60:.1f} minutes. Figure: {result.figure}   weights: {result.out}/encoder.safetensors")
    print(f"Report (open in a browser): {result.report}")
    print(
        f"\nLoad the encoder without snclr:\n\n{loading_snippet(load_encoder(Path(result.out))[1], Path(result.out))}"
    )
    print("Now your own images:  snclr pretrain --data my-photos/ --out runs/photos")


COMMANDS = {
    "demo": Command(
        function=demo,
        show=show_demo,
        examples=_EXAMPLES,
        without=("overwrite",),
        intro=_INTRO,
        saved="a demo cannot be resumed and starts from the beginning",
    )
}
