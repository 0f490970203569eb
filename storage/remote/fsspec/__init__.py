"""Stores by way of the drivers of fsspec; what drivers do differently is in ``dialects``."""
