"""Print the result of `snclr demo`."""

from __future__ import annotations

from pathlib import Path

from snclr.api.demo import DemoResult, demo
from snclr.cli.evaluate import accuracy, describe_chance, own_row
from snclr.cli.flags import Command
from snclr.cli.output import print_table
from snclr.errors import count

_EXAMPLES = """Examples:
  snclr demo
  snclr demo --seed 1 --out runs/demo-1
"""
_INTRO = "Pre-training on 6,000 small photographs, without their labels. This takes a few minutes."


def show_demo(result: DemoResult) -> None:
    """Print the accuracies, their protocols and where the files are."""
    from snclr.checkpoint.encoder_file import load_encoder, loading_snippet

    knn, linear = ({"trained (SNCLR)": own_row(part), **part.baselines} for part in (result.knn, result.linear))
    images = count(result.knn.n, "test image")
    print(f"\ntop-1 accuracy ± standard error on {images}; {describe_chance(result.knn)}")
    print_table(
        ["features", f"kNN (k = {result.knn.k})", "linear"],
        [(name, accuracy(row), accuracy(linear[name])) for name, row in knn.items()],
    )
    purity = ", ".join(f"{share:.0%}" for share in result.neighbor_purity)
    print(f"\nneighbor purity, 1st to {len(result.neighbor_purity)}th neighbor: {purity}")
    print(f"  {result.purity_description}")
    print(f"\nProtocols (labels are used only here)\n  {result.knn.protocol}\n  {result.linear.protocol}")
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
