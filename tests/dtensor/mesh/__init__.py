"""Tests of dtckpt.dtensor.mesh."""
