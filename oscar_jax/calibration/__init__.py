"""From a model and text to a rotation set."""
