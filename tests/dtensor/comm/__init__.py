"""Tests of dtckpt.dtensor.comm."""
