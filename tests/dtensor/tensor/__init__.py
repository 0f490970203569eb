"""Tests of dtckpt.dtensor.tensor."""
