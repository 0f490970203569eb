"""Meshes under the name of torch's module: ``from ... import device_mesh``."""

from __future__ import annotations

from .mesh.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
