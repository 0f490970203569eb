"""What ranks read for each other, and how it gets to those who want it.

Three ways: out of memory that the ranks of a host share (``on_host``), and over the process group,
by broadcasts to replicas (``broadcasting``) or in stripes of which each rank gets its part
(``exchanging``). Which of them a load takes, and for which tensors, is decided in ``read_once``.
"""
