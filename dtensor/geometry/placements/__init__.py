"""Placements: a kind a file, each with all that layouts, routes and operators ask of it."""
