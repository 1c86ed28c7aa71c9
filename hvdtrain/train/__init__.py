"""The training side: devices, learning rate, checkpoints, callbacks, and `fit`."""
