"""`python -m hvdtrain`."""

from hvdtrain.cli.main import main

if __name__ == "__main__":
    main()
