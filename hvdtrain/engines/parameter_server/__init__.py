"""Engine `ps`: a chief, workers that compute gradients, and servers that hold the parameters.

The model is an ordinary Keras model on the chief; TensorFlow's ClusterCoordinator runs the workers.

- `roles`: which rank is what; `supervisor`: starts, and restarts, the process of a role; `child`:
  that process (also the evaluator's), and whether it still answers;
- `chief`: the training, from model to files; `updates`: the order of gradients; `step`: one batch;
- `parameters`, `placement`: what lies where; `feeding`: the data, read by the workers;
- `tf_seam`, `keras_parts`: private parts of TensorFlow, Keras.
"""
