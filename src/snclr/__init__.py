"""SNCLR: self-supervised image encoders with soft neighbors as positive supporters (ICLR 2023).

The public names are listed in `__init__.pyi`. Each is imported on first use, so `import snclr` is fast.
"""

from snclr.runtime.early_interrupt import exit_on_interrupt

exit_on_interrupt()  # before the other imports

import lazy_loader  # noqa: E402

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
