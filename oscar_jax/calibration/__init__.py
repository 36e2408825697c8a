"""From a model and text, or from statistics, to a rotation set."""

from .job import calibrate, fit

__all__ = ["calibrate", "fit"]
