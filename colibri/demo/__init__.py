"""The embedded demo model: a small trained GLM-MoE-DSA container."""

from pathlib import Path

MODEL = Path(__file__).resolve().parent / "model"
