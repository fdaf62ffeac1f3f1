"""What is kept for backward?

An empty room: nothing is built here yet, and nothing imports it. `docs/architecture.md` says what it is for.
"""
