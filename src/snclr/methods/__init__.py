"""Self-supervised methods. `config` has each method's settings, the module of its name its networks and loss."""

from snclr.methods.config import METHODS as METHODS
