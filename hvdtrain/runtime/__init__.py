"""The rank side that needs no TensorFlow: failures, watchdog, progress."""
