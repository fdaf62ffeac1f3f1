"""Builds the compiled kernels; without a compiler the package installs and works without them."""

from pathlib import Path

from setuptools import Extension, setup

sources = sorted(str(path) for path in Path("native").glob("*.cpp"))
flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-g0", "-Wall", "-Wno-maybe-uninitialized"]
setup(
    ext_modules=[
        Extension(
            "shardwise._native",
            sources=sources,
            depends=["native/adam_vector.inc"],
            extra_compile_args=flags,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
