"""`python -m lightning_specdec`: the same command line as the installed script."""

from lightning_specdec.cli.main import main

if __name__ == "__main__":
    main()
