"""Conversion: checkpoints and containers in, containers out; resumable, checked, within bounds."""

from colibri.convert.conversion import convert_directory, repack_directory
from colibri.layout import Formats

__all__ = ["Formats", "convert_directory", "repack_directory"]
