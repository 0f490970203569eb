"""Mutants: changes of the code that the tests must notice. Not run by pytest: ``make mutants``.

Modules hold the mutants of one area, somebody's ideas of what could go wrong, as a tuple
``MUTANTS``. ``sweep`` makes every small change of a file instead.
"""
