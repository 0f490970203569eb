"""How bytes leave a rank: groups, collectives, and what is known of backends."""
