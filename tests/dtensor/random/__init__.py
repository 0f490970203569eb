"""Tests of dtckpt.dtensor.random."""
