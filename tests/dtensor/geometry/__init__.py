"""Tests of dtckpt.dtensor.geometry."""
