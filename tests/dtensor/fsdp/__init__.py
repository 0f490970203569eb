"""Tests of dtckpt.dtensor.fsdp."""
