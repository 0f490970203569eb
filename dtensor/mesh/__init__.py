"""This process's place: meshes with their groups, and layouts on them."""
