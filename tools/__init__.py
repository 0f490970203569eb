"""The ``dtckpt`` command, the demo and the benchmarks: public names of the packages only."""
