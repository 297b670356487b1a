"""One daemon per node: reports health, executes signed commands, starts ranks."""

__version__ = "0.1.0"
