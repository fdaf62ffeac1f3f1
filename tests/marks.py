"""Marks that several tests carry."""

from __future__ import annotations

import pytest

from shardwise import native

needs_native = pytest.mark.skipif(native.library() is None, reason="built without a C++ compiler: the Python engine runs instead")
