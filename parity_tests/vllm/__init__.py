"""Tests of the vLLM plugin that need neither vLLM nor a GPU: small engines stand in for the real one."""
