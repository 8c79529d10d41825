"""Builds the C core through cffi's API mode; everything else is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildCore(build_ext):
    """Compiles the core's files side by side: setuptools would take one after the other."""

    def build_extensions(self) -> None:
        one = self.compiler.compile

        def side_by_side(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(partial(one, **options), ([source] for source in sources))
                return list(chain.from_iterable(objects))

        self.compiler.compile = side_by_side
        super().build_extensions()


# The core keeps to Python's stable interface: one wheel serves 3.10 and everything after it.
setup(
    cffi_modules=["csrc/build.py:ffi"],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
