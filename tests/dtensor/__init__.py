"""Tests of dtckpt.dtensor."""
