"""One daemon per node: reports health, executes signed commands, starts ranks."""
