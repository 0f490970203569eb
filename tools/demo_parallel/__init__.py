"""The demonstration of dtckpt's own parallelisms behind ``make demo-parallel``."""
