"""Ways in which an update happens, beside allreduce: parameter servers, tf.distribute."""
