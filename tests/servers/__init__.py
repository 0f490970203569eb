"""Servers of object stores on loopback, one file each, for tests and benchmarks."""
