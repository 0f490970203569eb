"""Tests of dtckpt.dtensor.debug."""
