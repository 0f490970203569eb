"""Differential fuzzer: random programs on DTensors beside the same programs on one device.

``make fuzz`` runs it. ``programs`` has what it found, shrunk, as tests.
"""
