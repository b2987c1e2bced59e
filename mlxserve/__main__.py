"""`python -m mlxserve`."""

from mlxserve.entry import main

if __name__ == "__main__":
    main()
