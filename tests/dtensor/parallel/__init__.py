"""Tests of dtckpt.dtensor.parallel."""
