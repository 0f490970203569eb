"""Mutants: changes of the code that the tests must notice. Not run by pytest: ``make mutants``.

Each module beside this one but ``mutant`` holds the mutants of one area as a tuple ``MUTANTS``.
"""
