"""Which operators are too large to gather?

An empty room: nothing is built here yet, and nothing imports it. `docs/architecture.md` says what it is for.
"""
