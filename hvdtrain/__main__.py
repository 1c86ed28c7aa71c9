"""`python -m hvdtrain`."""

from hvdtrain.cli.start import main

if __name__ == "__main__":
    main()
