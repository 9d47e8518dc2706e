"""What the tests and benchmarks of actds are made with; not part of the installed package."""
