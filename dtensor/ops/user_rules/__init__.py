"""Rules of users: functions that list shardings, and what tries these out."""
