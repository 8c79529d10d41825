"""Builds the C core through cffi's API mode; everything else is in pyproject.toml."""

from setuptools import setup

# The core keeps to Python's stable interface: one wheel serves 3.10 and everything after it.
setup(cffi_modules=["csrc/build.py:ffi"], options={"bdist_wheel": {"py_limited_api": "cp310"}})
