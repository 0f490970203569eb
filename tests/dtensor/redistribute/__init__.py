"""Tests of dtckpt.dtensor.redistribute."""
