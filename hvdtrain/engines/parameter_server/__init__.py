"""Engine `ps`: a chief, workers that compute gradients, and servers that hold the parameters.

Built on TensorFlow's ClusterCoordinator. The model is an ordinary Keras model on the chief; its
parameters live on the servers, as vectors or pieces of their own. From the outside in:

- `roles`: which rank is what;
- `supervisor`, `child`: a rank starts the process of its role, and starts it again;
- `chief`: the training, from the model to the saved files;
- `trainer`: epochs, callbacks, evaluation;
- `asynchronous`, `synchronous`: in which order gradients are computed and applied;
- `closures`: what workers have not finished yet;
- `step`: one batch on a worker;
- `parameters`, `server_optimizer`, `placement`: what lies where, and how it is updated;
- `feeding`: the data, read by the workers themselves;
- `tf_seam`, `keras_parts`: what is private to TensorFlow and Keras.
"""
