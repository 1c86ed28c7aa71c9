"""`hvdtrain run`: a user's script, unchanged, on N ranks. Read `script.run` first.

`scan` reads the script and says what is done with each line. A Horovod script gets modules of
hvdtrain under Horovod's names (`horovod_names`). In a plain Keras script Keras' own methods work on
all ranks (`doors`), and so do loops with a `GradientTape` (`loops`). `keras2` serves what Keras 3
has removed.
"""
