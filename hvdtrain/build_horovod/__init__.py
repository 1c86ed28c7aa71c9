"""Builds Horovod for the TensorFlow that is installed; TensorFlow is never imported here."""
