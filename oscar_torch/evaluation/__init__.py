"""Texts to calibrate on and to judge with."""
