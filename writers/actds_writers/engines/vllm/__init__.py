"""Capture inside vLLM: the plugin, the worker side and the scheduler side."""
