"""`python -m mlxserve`."""

from mlxserve.cli.app import main

if __name__ == "__main__":
    main()
