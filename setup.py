"""Builds the C core through cffi's API mode; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["csrc/build.py:ffi"])
