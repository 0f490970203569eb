"""Tests of dtckpt.dtensor.calls."""
