"""`python -m tokamak` is the command line."""

from tokamak.cli.main import main

if __name__ == "__main__":
    main()
