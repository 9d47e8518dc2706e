"""Engines that can be harvested from, and what is asked of one."""
