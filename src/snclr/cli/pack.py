"""Print the result of `snclr pack`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from snclr.api.pack import pack, verify_shards
from snclr.cli.flags import Command
from snclr.errors import UserError, count, snclr_command
from snclr.runtime.stop import StopRequested

if TYPE_CHECKING:
    from snclr.data.shards.pack import PackResult, VerifyResult

_EXAMPLES = """Examples:
  snclr pack photos/ --shards photos-shards/
  snclr pretrain --data photos-shards/ --out runs/photos
  snclr pack imagenet/ --shards imagenet-shards/ --shard-size 1GB --workers 8 --check
  snclr pack --verify photos-shards/

The image files are stored unchanged, in tar files that WebDataset can read. A folder with train/ and val/ or test/ is
packed split by split. Images keep their ids, so a run on the shards has the same order and views as a run on the
folder. To read the shards from a web server or an object store, give the URL of shards.json as --data. The output
appears when it is complete; the same command resumes an interrupted pack.
"""


def pack_or_verify(
    folder: str | None = None, *, shards: str | None = None, verify: str | None = None, **options: Any
) -> PackResult | VerifyResult:
    """Pack a folder, or verify packed shards."""
    if verify is not None:
        if folder is not None or shards is not None:
            raise UserError("--verify checks existing shards; give it without FOLDER and --shards")
        return verify_shards(verify, quiet=options["quiet"])
    if folder is None or shards is None:
        raise UserError("give a folder of images and the output folder: snclr pack FOLDER --shards OUT")
    try:
        return pack(folder, shards=shards, **options)
    except KeyboardInterrupt:  # the finished shards are in a hidden folder beside the output
        raise StopRequested(signal.SIGINT) from None


def show_pack(result: PackResult | VerifyResult) -> None:
    """Print what was written, or which shards are damaged."""
    from snclr.data.shards.pack import VerifyResult

    if isinstance(result, VerifyResult):
        print("\n".join(result.wrong), end="\n" if result.wrong else "")
        damaged = f"damaged: {len(result.wrong):,} of {count(result.files, 'shard')}; pack or copy again"
        intact = f"intact (sha256): {count(result.files, 'shard')} with {count(result.images, 'image')}"
        print(damaged if result.wrong else intact)
        return
    images, shards = count(result.images, "image"), count(result.files, "shard")
    print(f"wrote {result.shards}: {images} in {shards}, {result.bytes:,} bytes")
    if result.skipped:
        print(f"skipped {count(len(result.skipped), 'file')} that cannot be read as images:")
        for file in result.skipped[:5]:
            print(f"  {file.key}: {file.reason}")
    print(f"train on them:  {snclr_command('pretrain', '--data', result.shards, '--out', 'RUN')}")


_VERIFY = Parameter(metavar="PATH", help="verify the hashes of packed shards; nothing is packed")
COMMANDS = {
    "pack": Command(
        function=pack,
        run=pack_or_verify,
        show=show_pack,
        exit_code=lambda result: 1 if getattr(result, "wrong", ()) else 0,
        examples=_EXAMPLES,
        saved="finished shards are kept",
        optional=("folder", "shards"),
        extra={"verify": Annotated[str | None, _VERIFY]},
    )
}
