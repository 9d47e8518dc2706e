"""``python -m actds``: the same as the ``actds`` command."""

from actds.cli import main

if __name__ == "__main__":
    main()
