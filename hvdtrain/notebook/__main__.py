"""Program: one rank of a call from a notebook; `python -m hvdtrain.notebook FOLDER`."""

from hvdtrain.notebook.rank import main

main()
