"""Validators: checks that pass or fail, never with an opinion."""
