"""Tests of dtckpt; helpers that several test modules share live in this package."""
