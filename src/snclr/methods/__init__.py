"""Self-supervised methods. `config` has each method's settings; their `implementation` names its module."""

from snclr.methods.config import METHODS as METHODS
