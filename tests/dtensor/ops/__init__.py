"""Tests of dtckpt.dtensor.ops."""
